"""Says on which line of the program something happens."""

from __future__ import annotations

import os
import sys

import torch

from ddpshim.job.group import world
from ddpshim.job.say import say_once

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_NOT_THE_PROGRAMS = (_OURS, os.path.dirname(torch.__file__), os.path.dirname(os.__file__), "<frozen")


def line_of_the_program() -> str:
    """file:line of the innermost frame of the program's own; of an installed package, if there is none. Local."""
    frame = sys._getframe(1)
    installed = ""
    while frame is not None:
        path = frame.f_code.co_filename
        is_package = "site-packages" in path or "dist-packages" in path
        if is_package or not path.startswith(_NOT_THE_PROGRAMS):
            where = f"{os.path.basename(path)}:{frame.f_lineno}"
            if not is_package:
                return where
            if not path.startswith(_NOT_THE_PROGRAMS):
                installed = installed or where
        frame = frame.f_back  # type: ignore[assignment]
    return installed or "a line of torch"


def say_on_main(text: str) -> None:
    """Print `text` once, on the main rank."""
    if world().is_main:
        say_once(text)
