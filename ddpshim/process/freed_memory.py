"""Makes malloc keep the memory that a training step frees, so that the next step can reuse it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_MMAP_ABOVE_BYTES = 32 * 2**20  # older releases of glibc accept no more
_MOST_KEPT_BYTES = 512 * 2**20


def keep(environ: Mapping[str, str]) -> bool:
    """Make malloc keep up to 512 MB of freed memory; returns whether it does. Local.

    Otherwise glibc returns each step's tensors to the system, and the next step gets them back page by page: 7,000 page
    faults in a step of an LSTM on the CPU. Does nothing if the user has set malloc's variables, or with another malloc.
    """
    if "GLIBC_TUNABLES" in environ or any(name.startswith("MALLOC_") for name in environ):
        return False
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE_BYTES) and mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES))
