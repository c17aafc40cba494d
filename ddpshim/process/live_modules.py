"""Finds all modules of torch in this process."""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

_MOST_S = 1.0  # longer than a search through a few million objects


def live_modules() -> list[Any]:
    """Return every torch.nn.Module whose __init__ has run. Local.

    A tuple that another thread is building (torch's pinning thread, say) may be among all objects, and that thread gets
    a SystemError if it goes on while a list of them exists (bpo-15108). So no thread may run in between.
    """
    from torch import nn

    before = sys.getswitchinterval()
    sys.setswitchinterval(_MOST_S)
    try:
        time.sleep(2 * before)  # threads that wait for their turn wait by the old interval until then
        return [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and "_modules" in o.__dict__]
    finally:
        sys.setswitchinterval(before)
