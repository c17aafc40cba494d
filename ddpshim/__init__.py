"""Move a DataParallel or single-GPU trainer to DistributedDataParallel: the same experiment, only faster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddpshim.errors import (
    CheckpointError,
    DataError,
    DdpShimError,
    HookError,
    LaunchError,
    OptionsError,
    PatchError,
    ReportError,
    RolloutError,
    SyncError,
    WorldError,
)

if TYPE_CHECKING:
    from ddpshim.accumulation import accumulate as accumulate
    from ddpshim.failure import abort as abort
    from ddpshim.group import World as World
    from ddpshim.group import cleanup as cleanup
    from ddpshim.group import setup as setup
    from ddpshim.group import split_random_streams as split_random_streams
    from ddpshim.group import world as world
    from ddpshim.guard import check_equal_steps as check_equal_steps
    from ddpshim.loader import make_loader as make_loader
    from ddpshim.loader import scale_lr as scale_lr
    from ddpshim.node_memory import shared_arrays as shared_arrays
    from ddpshim.options import Options as Options
    from ddpshim.parallel import wrap_parallel as wrap_parallel
    from ddpshim.profiling import profile as profile
    from ddpshim.recording import record as record
    from ddpshim.resume import Resumable as Resumable
    from ddpshim.sharding import shard_iterable as shard_iterable
    from ddpshim.streams import shared_random_streams as shared_random_streams
    from ddpshim.tfdata import shard_tfdata as shard_tfdata
    from ddpshim.transparent import unwrap as unwrap

__version__ = "0.1.0"

# Loaded when first used: the patch command must answer without the seconds that importing torch takes.
_HOMES = {
    "Options": "options",
    "World": "group",
    "abort": "failure",
    "accumulate": "accumulation",
    "cleanup": "group",
    "setup": "group",
    "split_random_streams": "group",
    "world": "group",
    "check_equal_steps": "guard",
    "make_loader": "loader",
    "scale_lr": "loader",
    "profile": "profiling",
    "wrap_parallel": "parallel",
    "Resumable": "resume",
    "record": "recording",
    "shard_iterable": "sharding",
    "shared_arrays": "node_memory",
    "shared_random_streams": "streams",
    "shard_tfdata": "tfdata",
    "unwrap": "transparent",
}

__all__ = [
    "CheckpointError",
    "DataError",
    "DdpShimError",
    "HookError",
    "LaunchError",
    "OptionsError",
    "PatchError",
    "ReportError",
    "RolloutError",
    "SyncError",
    "WorldError",
    *sorted(_HOMES),
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpshim' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ddpshim.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
