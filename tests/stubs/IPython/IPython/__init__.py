"""Stands in for IPython where it is not installed: the act package names its debugger when it is imported."""

from typing import Any


def embed(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a debugger was asked for")


version_info = (8, 24)  # matplotlib asks


def get_ipython() -> None:
    """No shell is there, which matplotlib asks, too."""
