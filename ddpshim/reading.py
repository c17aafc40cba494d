"""Reads files that others may have written: anything but a regular file is an error, since reading it may block."""

from __future__ import annotations

import errno
import os
import stat
from typing import Union

_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def read_bytes(path: Union[str, os.PathLike[str]]) -> bytes:
    """Return the content of the regular file at `path`, following links. Local.

    Raises OSError if it cannot be read, or is a folder, a device or a pipe: reading a pipe might never return.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _WITHOUT_WAITING)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, "not a regular file", os.fspath(path))
    with open(descriptor, "rb") as file:
        return file.read()
