"""Reads files that others may have written: anything but a regular file is an error, since reading it may block."""

from __future__ import annotations

import errno
import os
import stat
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
