"""Finds the line of the user's program that is running, for messages; a library's or ddpshim's is not the user's."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from types import FrameType
from typing import Any, Callable, Optional

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PYTHON = os.path.dirname(os.__file__)
_relative = functools.lru_cache(maxsize=4096)(os.path.relpath)


def users_line(
    frame: Optional[FrameType] = None, error: Optional[BaseException] = None, default: str = "a line of torch"
) -> str:
    """Return "train.py:12", the innermost line of the user's program; else of an installed package. Local.

    `frame`: where to begin; default the caller. `error`: begin where it was raised.
    """
    frame = frame or sys._getframe(1)
    for raised, _ in traceback.walk_tb(error.__traceback__ if error is not None else None):
        frame = raised
    place = _place(frame)
    return default if place is None else shown(*place)


def _place(frame: Optional[FrameType]) -> Optional[tuple[str, int]]:
    installed, package = None, _started_package()
    while frame is not None:
        place = file, _ = frame.f_code.co_filename, frame.f_lineno
        if _is_of_program(file, package):
            return place
        if installed is None and not is_torchs_or_ours(file):
            installed = place
        frame = frame.f_back
    return installed


def warning_at_users_line(original: Callable[..., str]) -> Callable[..., str]:
    """Return the stand-in for warnings.formatwarning, by which a warning of ddpshim's lines is of the user's. Local."""

    def formatwarning(message: Any, category: Any, filename: str, lineno: int, line: Optional[str] = None) -> str:
        if filename.startswith(OURS + os.sep):
            frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
            at = next((frame for frame in frames if frame.f_code.co_filename == filename), None)
            filename, lineno = _place(at) or (filename, lineno)
        return original(message, category, filename, lineno, line)

    return formatwarning


def is_users(file: str) -> bool:
    """Return whether `file` is of no library, or of the package that Python was started with (`-m`). Local."""
    return _is_of_program(file, _started_package())


def _started_package() -> str:
    return (getattr(sys.modules.get("__main__"), "__package__", None) or "").partition(".")[0]


@functools.lru_cache(maxsize=4096)
def _is_of_program(file: str, package: str) -> bool:
    is_installed = "site-packages" in file or "dist-packages" in file
    is_started = bool(package) and f"{os.sep}{package}{os.sep}" in file
    return not is_torchs_or_ours(file) and (is_started or not is_installed)


@functools.lru_cache(maxsize=4096)
def is_torchs_or_ours(file: str) -> bool:
    """Return whether `file` is of torch, ddpshim or Python's standard library. Local."""
    return short(file).startswith(("torch/", "ddpshim/", "python/", "<"))


def is_pythons(file: str) -> bool:
    """Return whether `file` is of Python's standard library. Local."""
    return file.startswith(_PYTHON + os.sep) and "-packages" not in file


def short(file: str) -> str:
    """Return a file's name from "torch/", "ddpshim/" or "python/" on, if it belongs to one; else unchanged. Local."""
    torch = sys.modules.get("torch")
    roots = {"ddpshim": OURS, "torch": os.path.dirname(getattr(torch, "__file__", None) or "/no torch")}
    for name, root in roots.items():
        if file.startswith(root + os.sep):
            return name + file[len(root) :].replace(os.sep, "/")
    return "python" + file[len(_PYTHON) :].replace(os.sep, "/") if is_pythons(file) else file.replace(os.sep, "/")


def shown(file: str, line: object) -> str:
    """Return "file:line" as messages print it: relative to the working folder if the file is in it. Local."""
    near = _relative(file, os.getcwd())
    return f"{file if near.startswith('..') else near}:{line}"
