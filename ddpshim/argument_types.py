"""Reads numbers from a command line; what is none is an error in words."""

from __future__ import annotations

import argparse
import re


def natural(text: str) -> int:
    """A whole number from 0 up."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number from 0 up")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if natural(text) == 0:
        raise argparse.ArgumentTypeError("0 is not a whole number from 1 up")
    return int(text)


def port(text: str) -> int:
    """The number of a port."""
    if not 1 <= natural(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; ports are 1 to 65535")
    return int(text)


def nproc(text: str) -> str:
    """A number of ranks, or what torchrun understands."""
    return text if text in ("auto", "gpu", "cpu", "xpu") else str(positive(text))


def seconds(text: str) -> float:
    """A number of seconds."""
    if not re.fullmatch(r"[0-9]*\.?[0-9]+(e[0-9])?", text):  # float() takes "nan", and digits of other scripts
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number of seconds")
    return float(text)


def several(text: str) -> int:
    """A whole number from 2 up."""
    if positive(text) < 2:
        raise argparse.ArgumentTypeError("1 rank has nothing to be compared with; give 2 or more")
    return int(text)
