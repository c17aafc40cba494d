"""Finds the line of the program that is running, for messages."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Optional

import torch

from ddpshim.job.group import world
from ddpshim.job.say import say_once

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_NOT_THE_PROGRAMS = (_OURS, os.path.dirname(torch.__file__), os.path.dirname(os.__file__), "<frozen")


def line_of_the_program() -> str:
    """Return "file:line" of `frame_of_the_program`. Local."""
    frame = frame_of_the_program()
    if frame is None:
        return "a line of torch"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def frame_of_the_program() -> Optional[FrameType]:
    """Return the innermost frame of the program's own files; if there is none, of an installed package. Local."""
    frame: Optional[FrameType] = sys._getframe(1)
    installed = None
    while frame is not None:
        path = frame.f_code.co_filename
        if not is_not_the_programs(path):
            if "site-packages" not in path and "dist-packages" not in path:
                return frame
            installed = installed or frame
        frame = frame.f_back
    return installed


def is_not_the_programs(path: str) -> bool:
    """Whether the file is ddpshim's, torch's or Python's. Local."""
    return path.startswith(_NOT_THE_PROGRAMS)


def say_on_main(text: str) -> None:
    """Print `text` once, on the main rank."""
    if world().is_main:
        say_once(text)
