"""Reads files that others may have written, whole or their last lines."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Union

_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0)


def read_bytes(path: Union[str, os.PathLike[str]]) -> bytes:
    """Return the content of the regular file at `path`, following links. Local.

    Raises OSError if it cannot be read, or is a folder, a device or a pipe: reading a pipe might never return.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _WITHOUT_WAITING)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
            return file.read()
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None


def end_of(log: Path, num_lines: int = 20) -> str:
    """Return the last lines of `log`, of a progress bar the last state; "" if it does not exist. Local."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - (1 << 16)))
        lines = file.read().decode(errors="replace").rstrip().split("\n")[-num_lines:]
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
