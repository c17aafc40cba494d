"""Move a DataParallel or single-GPU trainer to DistributedDataParallel: the same experiment, only faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Optional, Union

from ddpshim import lazy, version
from ddpshim.errors import CheckpointError as CheckpointError
from ddpshim.errors import DataError as DataError
from ddpshim.errors import DdpShimError as DdpShimError
from ddpshim.errors import LaunchError as LaunchError
from ddpshim.errors import OptionsError as OptionsError
from ddpshim.errors import PatchError as PatchError
from ddpshim.errors import RankError as RankError
from ddpshim.errors import ReportError as ReportError
from ddpshim.errors import RolloutError as RolloutError
from ddpshim.errors import SyncError as SyncError
from ddpshim.errors import WorldError as WorldError
from ddpshim.version import __version__ as __version__

if TYPE_CHECKING:
    import torch

    from ddpshim.checkpoint.resume import Resumable as Resumable
    from ddpshim.evaluation.dealing import deal as deal
    from ddpshim.evaluation.evaluating import evaluate as evaluate
    from ddpshim.failures.failure import abort as abort
    from ddpshim.job.group import cleanup as cleanup
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
    "job.group": ("cleanup", "world"),
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
    *("CheckpointError", "DataError", "DdpShimError", "LaunchError", "OptionsError", "PatchError", "RankError"),
    *("ReportError", "RolloutError", "SyncError", "WorldError", *sorted([*_HOMES, "setup"])),
]
_HOMES["load_ipython_extension"] = "launch.notebook"  # `%load_ext ddpshim` calls it


def setup(
    *,
    batch: Literal["local", "global"] = "local",
    seed: Optional[int] = None,
    device: Union[str, torch.device, None] = None,
    backend: Optional[str] = None,
    timeout_s: Optional[float] = None,
    side_timeout_s: Optional[float] = None,
    options: Optional[Options] = None,
) -> World:
    """Return the World of this process; joins the job that the launcher's variables describe.

    Collective under a launcher; in a plain `python train.py` it starts nothing, and both values of `batch` are one
    process as it was. Reads the environment once and never changes it. Uses an existing process group if the program
    made one. Calling it again returns the same World.

    Args:
        batch: what the program holds on several ranks.
            "local": this rank's share of a batch, from `make_loader`, and gradients averaged by `wrap_parallel`:
            torch's DistributedDataParallel as its users know it. The order of samples and the random numbers are then
            not those of one process.
            "global": the whole batch, as with `nn.DataParallel`, for the numbers of one process: loader, loss, metrics
            and files stay as they are, and networks compute on this rank's rows (`python -m ddpshim docs run`). Call
            it before anything else.
        seed: seeds torch, numpy and random *equally* on all ranks, so that networks start equal. With "local" a rank
            draws its own noise after `split_random_streams()`; with "global" all draw that of one process.
        device: this rank's device; default its own GPU, else the CPU. "cuda" selects the rank's GPU.
        backend: torch's name; default nccl if each rank has its own GPU, else gloo.
        timeout_s: how long a rank waits for peers in the rendezvous and in a training collective.
        side_timeout_s: how long ranks wait in World's own collectives while one rank works alone.
        options: the run's options; default `Options.read()`, from DDPSHIM_* variables.

    Raises:
        LaunchError: launch variables are missing, malformed or contradictory, or the port is in use.
        OptionsError: options are wrong, or differ between ranks; another `batch`.
        WorldError: called again with arguments that contradict the first call.
    """
    version.check_torch()
    if batch not in ("local", "global"):
        raise OptionsError(
            f"setup(batch={batch!r}): it is unclear what the program holds, and ranks would take a local batch for the "
            'global one. Use "local" (each rank loads its local batch) or "global" (the whole batch).'
        )
    given: dict[str, Any] = {"seed": seed, "device": device, "backend": backend, "options": options}
    given.update(timeout_s=timeout_s, side_timeout_s=side_timeout_s)
    if batch == "global":
        from ddpshim.trainers.unedited import program

        return program.join(**given)
    from ddpshim.job import group

    return group.join(**given)


if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            version.check_torch()
        return lazy.load(__name__, _HOMES, name, globals())


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
