"""Refuses a step of one of several processes that train separate models, into the same files.

Imports no torch: the program decides when it is imported.
"""

from __future__ import annotations

import os
import sys

from ddpshim import variables
from ddpshim.errors import LaunchError, SyncError
from ddpshim.failures.unsynced_check import Answer, num_collectives
from ddpshim.process.job import current

_OTHERS = ("horovod", "mpi4py", "deepspeed", "colossalai", "torch_xla")  # a program may distribute itself with these


def refuse(found: str, answer: Answer) -> None:
    """Raise SyncError about `found` if this is one of several processes that train separate models. Local."""
    size = _num_alone(answer)
    if size <= 1:
        answer.is_settled = True
        return
    is_set_up = current().world is not None
    nothing = "no network was wrapped by wrap_parallel" if is_set_up else "nothing has distributed this program"
    wrapping = "its networks with wrap_parallel and its loaders with make_loader (`python -m ddpshim docs MIGRATION`)"
    unedited = f"`{variables.UNEDITED}=on python -m ddpshim run --nproc {size}`"
    to_do = (
        f"Wrap {wrapping}."
        if is_set_up
        else f"Start a one-process trainer, unedited, by {unedited}; or wrap {wrapping}."
    )
    raise SyncError(
        f"{found}: {nothing}. {size} processes would train {size} separate models, into the same files. {to_do} If "
        "each process is meant to train its own model (a sweep), DDPSHIM_GUARD=0 turns this check off."
    )


def _num_alone(answer: Answer) -> int:
    """Return how many processes train separate models; 1 if they do not, or if the user wants that."""
    from ddpshim.options import Options

    job = current()
    if job.world is not None:
        before, now = answer.num_collectives, num_collectives()
        is_shared = not job.world.options.guard or before is None or now is None or now > before
        return 1 if is_shared else job.world.world_size
    if job.left is not None or _distributes_itself():
        return 1
    from ddpshim.process.launch_env import read_launch_env

    try:
        size = read_launch_env(os.environ).world_size
    except LaunchError:
        return 1  # `setup` reports it, if the program calls it
    return size if size > 1 and Options.read().guard else 1


def _distributes_itself() -> bool:
    distributed = sys.modules.get("torch.distributed")
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return has_group or any(name in sys.modules for name in _OTHERS)
