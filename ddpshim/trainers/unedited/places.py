"""Finds the line of the program that is running, for messages."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType
from typing import Optional

import torch

from ddpshim.job.group import world
from ddpshim.job.say import say_once

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_NOT_THE_PROGRAMS = (_OURS, os.path.dirname(torch.__file__), os.path.dirname(os.__file__), "<frozen")


def line_of_the_program(error: Optional[BaseException] = None) -> str:
    """Return "file:line" of the innermost frame of the program's own files; else of an installed package. Local.

    `error`: where it was raised, in place of where this is called.
    """
    frame: Optional[FrameType] = sys._getframe(1)
    installed = None
    if error is not None:
        for raised, _ in traceback.walk_tb(error.__traceback__):
            frame = raised
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_THE_PROGRAMS):
            line = f"{os.path.basename(path)}:{frame.f_lineno}"
            if "site-packages" not in path and "dist-packages" not in path:
                return line
            installed = installed or line
        frame = frame.f_back
    return installed or "a line of torch"


def say_on_main(text: str) -> None:
    """Print `text` once, on the main rank."""
    if world().is_main:
        say_once(text)
