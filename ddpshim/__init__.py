"""Move a DataParallel or single-GPU trainer to DistributedDataParallel: the same experiment, only faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpshim import lazy, version
from ddpshim.errors import (
    CheckpointError,
    DataError,
    DdpShimError,
    LaunchError,
    OptionsError,
    PatchError,
    RankError,
    ReportError,
    RolloutError,
    SyncError,
    WorldError,
)
from ddpshim.version import __version__ as __version__

if TYPE_CHECKING:
    from ddpshim.checkpoint.resume import Resumable as Resumable
    from ddpshim.evaluation.dealing import deal as deal
    from ddpshim.evaluation.evaluating import evaluate as evaluate
    from ddpshim.failures.failure import abort as abort
    from ddpshim.job.group import cleanup as cleanup
    from ddpshim.job.group import setup as setup
    from ddpshim.job.group import world as world
    from ddpshim.job.world import World as World
    from ddpshim.launch.spawning import spawn as spawn
    from ddpshim.model.guard import check_equal_steps as check_equal_steps
    from ddpshim.model.guard import watch as watch
    from ddpshim.model.parallel import wrap_parallel as wrap_parallel
    from ddpshim.model.wrapper import unwrap as unwrap
    from ddpshim.observe.recording import profile as profile
    from ddpshim.observe.recording import record as record
    from ddpshim.options import Options as Options
    from ddpshim.process.random_streams import shared_random_streams as shared_random_streams
    from ddpshim.robomimic.node_memory import shared_arrays as shared_arrays
    from ddpshim.shares.batch import accumulate as accumulate
    from ddpshim.shares.batch import on_device as on_device
    from ddpshim.shares.loader import make_loader as make_loader
    from ddpshim.shares.loader import scale_lr as scale_lr
    from ddpshim.shares.streams import split_random_streams as split_random_streams

# Loaded on first use: `patch` must not wait for torch, whose import takes seconds.
_NAMES = {
    "checkpoint.resume": ("Resumable",),
    "shares.batch": ("accumulate", "on_device"),
    "shares.loader": ("make_loader", "scale_lr"),
    "robomimic.node_memory": ("shared_arrays",),
    "evaluation.dealing": ("deal",),
    "evaluation.evaluating": ("evaluate",),
    "failures.failure": ("abort",),
    "job.group": ("cleanup", "setup", "world"),
    "shares.streams": ("split_random_streams",),
    "job.world": ("World",),
    "launch.spawning": ("spawn",),
    "model.guard": ("check_equal_steps", "watch"),
    "model.parallel": ("wrap_parallel",),
    "model.wrapper": ("unwrap",),
    "observe.recording": ("profile", "record"),
    "options": ("Options",),
    "process.random_streams": ("shared_random_streams",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "CheckpointError",
    "DataError",
    "DdpShimError",
    "LaunchError",
    "OptionsError",
    "PatchError",
    "RankError",
    "ReportError",
    "RolloutError",
    "SyncError",
    "WorldError",
    *sorted(_HOMES),
]


if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def _join_with_whole_batches(**given: Any) -> Any:
        from ddpshim.trainers.unedited.joining import join_edited

        return join_edited(**given)

    lazy.DOORS["global"] = _join_with_whole_batches

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            version.check_torch()
        return lazy.load(__name__, _HOMES, name, globals())


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
