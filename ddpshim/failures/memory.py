"""Says of an error that memory ran out in a network's call which call it was, and what computes it in less."""

from __future__ import annotations

import math
import os
import traceback
from typing import Any, Optional

from ddpshim.process.job import current
from ddpshim.variables import PREFIX

# torch.OutOfMemoryError of GPUs; what torch's allocator of CPUs says.
_SIGNS = ("out of memory", "not enough memory", "DefaultCPUAllocator: can't allocate memory")
_OPTION = f"{PREFIX}ROWS_AT_ONCE"


def explain(error: BaseException) -> None:
    """Add to the text of an error of torch, if memory ran out in a network, what to do. Local."""
    text, world = str(error), current().world
    if _OPTION in text or not isinstance(error, RuntimeError) or not any(sign in text for sign in _SIGNS):
        return
    called = next((found for frame, _ in traceback.walk_tb(error.__traceback__) if (found := _call_in(frame))), None)
    where, most = "outside of a network's call, perhaps in its backward pass", 32
    if called is not None:
        most = math.ceil(called[1] / (1 if world is None else world.world_size))
        where = f"in the call of {called[0]} on {called[1]} rows, {most} on this rank"
    if (present := os.environ.get(_OPTION, "").strip()).isdigit():
        most = min(most, int(present))
    advice = f"{_OPTION}={max(1, most // 2)} computes a network on so many rows at once, with the same numbers"
    error.args = (f"{text}\nmemory ran out {where}: {advice} (python -m ddpshim docs one_gpu).", *error.args[1:])


def _call_in(frame: Any) -> Optional[tuple[str, int]]:
    """Return which network a frame of torch calls, and the number of rows that it gets. Local."""
    if frame.f_code.co_name != "_wrapped_call_impl" or "self" not in frame.f_locals:
        return None
    given = [*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values()]
    while given:
        one = given.pop(0)
        if isinstance(one, (list, tuple, dict)):
            given = [*(one.values() if isinstance(one, dict) else one), *given]
        elif len(getattr(one, "shape", ())):
            return type(frame.f_locals["self"]).__name__, int(one.shape[0])
    return None
