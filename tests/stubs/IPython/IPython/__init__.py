"""Replaces IPython if it is not installed: the act package imports its debugger."""

from typing import Any


def embed(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a debugger was asked for")


version_info = (8, 24)  # matplotlib reads it


def get_ipython() -> None:
    """Return None, as without a shell; matplotlib calls it."""
