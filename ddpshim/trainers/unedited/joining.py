"""Runs a program for one process as a rank: joins the job, and replaces names of torch until the program ends.

Every rank runs the whole program. Networks are wrapped when they first train; batches are row tensors (`ddpshim.rows`).
See docs/run.md. If the program turns out to distribute itself, each rank is restarted without ddpshim's changes.

One that uses Hugging Face's accelerate does not distribute itself, unless it divides its model (DeepSpeed, FSDP,
Megatron, tensor parallelism): accelerate sees one process on each rank, so the batch size is that of the program's
loader.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Optional

import torch
import torch.distributed as dist
from torch.utils import data as torch_data

from ddpshim import adapters, variables
from ddpshim.errors import SyncError
from ddpshim.failures import unsynced_check
from ddpshim.job import group
from ddpshim.job.group import cleanup, world
from ddpshim.job.world import World
from ddpshim.model.backward import Passes
from ddpshim.model.mean_gradients import MeanGradients
from ddpshim.observe.step_times import StepTimes
from ddpshim.process.job import Door, Job, current
from ddpshim.process.observed import called, observe
from ddpshim.process.replaced import after_import, noted, replaced
from ddpshim.process.say import say_on_main
from ddpshim.process.users_line import users_line, warning_at_users_line
from ddpshim.rows import calls
from ddpshim.rows.loader import DataLoader
from ddpshim.rows.tensor import Counts
from ddpshim.trainers.unedited.clock import Clock, Commands, shared_readings
from ddpshim.trainers.unedited.file_calls import Locks, in_place
from ddpshim.trainers.unedited.networks import Networks, say_what_was_divided
from ddpshim.trainers.unedited.private_files import PrivateFiles, rollouts_on_main
from ddpshim.trainers.unedited.reads import equal_reads
from ddpshim.trainers.unedited.set_order import make_alike

if TYPE_CHECKING:
    from ddpshim.trainers.unedited.program import Start


def _joined_loader(*args: Any, **options: Any) -> Any:
    from ddpshim.rows.joined_loader import JoinedLoader

    return JoinedLoader(*args, **options)


DOOR = Door("global", MeanGradients, DataLoader, _joined_loader)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Classes of diffusion_policy and DP3 that play rollouts: module, name.
_RUNNERS = (
    ("diffusion_policy.env_runner.base_image_runner", "BaseImageRunner"),
    ("diffusion_policy.env_runner.base_lowdim_runner", "BaseLowdimRunner"),
    ("diffusion_policy_3d.env_runner.base_runner", "BaseRunner"),
)


@contextlib.contextmanager
def joined(start: Start) -> Iterator[None]:
    """Join the job; within this block, imported programs find the replaced names; then leave the job (collective)."""
    try:
        with _as_one_program(_set_up(), start):
            yield
            _say_goodbye()
    except SystemExit as error:
        if not error.code:
            world().barrier()
        raise
    finally:
        cleanup()


def join_edited(**given: Any) -> World:
    """Join the job until `cleanup()` or the end of the program, which calls this; see `setup` (collective)."""
    job, until = current(), contextlib.ExitStack()
    if job.world is not None:
        return group.join(DOOR, **given)
    here = _set_up(**given)
    with noted() as stand_ins:
        until.enter_context(_as_one_program(here))
    until.enter_context(in_place(stand_ins, "torch"))
    job.before_end.callback(_say_goodbye)
    job.at_end.callback(until.close)
    atexit.register(_leave, job, os.getpid())
    return here


def _leave(job: Job, process: int) -> None:
    """Leave the job at the end of a program that does not call `cleanup()` (collective)."""
    is_aborted = job.is_failing() or threading.current_thread() is not threading.main_thread()  # as `abort` runs this
    if job is current() and os.getpid() == process and not is_aborted:
        cleanup()


def _say_goodbye() -> None:
    """Say what was divided, and wait for other ranks (collective)."""
    say_what_was_divided()
    world().barrier()  # other ranks may still query the store for saved files, and rank 0 may host it


def see_one_gpu(local_rank: int) -> None:
    """Make one GPU visible to this process, so that "cuda:0" is this rank's. Call before CUDA starts. Local."""
    visible = os.environ.get(_VISIBLE)
    if visible is None or visible.strip():
        gpus = visible.split(",") if visible else [str(local_rank)]
        os.environ[_VISIBLE] = gpus[local_rank % len(gpus)].strip()


def _set_up(seed: Optional[int] = None, **given: Any) -> World:
    """Join the job; a program without a seed gets one, as ranks must be equal: weights, data splits (collective)."""
    see_one_gpu(int(os.environ.get("LOCAL_RANK", 0)))
    here = group.join(DOOR, seed=seed, **given)
    if seed is None:
        here = group.join(DOOR, seed=here.broadcast(int(os.environ.get(variables.SEED) or secrets.randbits(62))))
        current().part(Networks).drawn_seed = here.seed
    return here


@contextlib.contextmanager
def _as_one_program(here: World, start: Optional[Start] = None) -> Iterator[None]:
    """Within this block the ranks run one program. It is left alone if it distributes itself, if `start` is given."""
    networks, counts, locks = current().part(Networks), current().part(Counts), Locks()
    with contextlib.ExitStack() as undo:
        for module in (torch_data, torch_data.dataloader):
            undo.enter_context(replaced(module, "DataLoader", DataLoader))
        undo.enter_context(replaced(warnings, "formatwarning", warning_at_users_line(warnings.formatwarning)))
        undo.callback(networks.forget)
        optimizer = torch.optim.Optimizer
        noting = called(optimizer.add_param_group, after=lambda optimizer, _: networks.take_note(optimizer))
        undo.enter_context(replaced(optimizer, "add_param_group", noting))
        if here.options.exact is None:  # whose number of threads must not depend on the number of ranks
            undo.enter_context(_cores_shared(here.local_world_size))
        hidden = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith(_LAUNCHERS)}
        undo.callback(os.environ.update, hidden)
        undo.callback(os.environ.pop, variables.RANK, None)
        os.environ[variables.RANK] = hidden.get("RANK", "0")

        def leave(removes_new: bool) -> None:
            here.barrier()
            undo.close()
            if removes_new and here.world_size > 1:
                files.changes.remove_new()
            cleanup()
            if here.is_main:
                time.sleep(_LAST_ANSWER_S)

        current().part(StepTimes)
        if start is not None:
            start.leave = leave
            _notice(start, undo)
        if here.world_size > 1:
            make_alike()
            since = time.time() if start is None else start.time
            counts.lock = locks.held
            files, clock = PrivateFiles(here, since), Clock(here, shared_readings(here))
            for part in (files, clock, Commands(clock, files)):
                undo.enter_context(part.installed())
            _play_rollouts_on_main(here, files, undo)
            current().part(unsynced_check.Answer).is_settled = True
            current().part(Passes)  # first, so that a network that is wrapped as its first pass begins takes part in it
            observe(undo, backward=networks.begin_pass, before_step=networks.note_step)
            undo.enter_context(locks.installed())
            undo.enter_context(equal_reads(here))
        needs_capture = here.options.rows_at_once is not None or here.options.graphs == "on"
        if needs_capture:
            from ddpshim.rows import capture

            capture.check_options(here.options)
        if here.world_size > 1 or here.options.exact is not None or needs_capture:
            undo.enter_context(calls.installed())
        if here.options.exact is not None:
            from ddpshim.rows import pieces

            undo.enter_context(pieces.installed())
        if here.device.type == "cuda":
            undo.enter_context(_gpus_shown(here.local_world_size))
        yield


def _play_rollouts_on_main(here: World, files: PrivateFiles, until: contextlib.ExitStack) -> None:
    """Until `until` ends, also for classes that an adapter names. Local."""

    def take(module: str, name: str) -> None:
        base = getattr(sys.modules[module], name)
        until.enter_context(replaced(base, "__init_subclass__", rollouts_on_main(base, here, files)))

    offers = [adapters.function(package, "rollouts") for package in adapters.packages()]
    for module, name in [*_RUNNERS, *(base for offer in offers if offer is not None for base in offer())]:
        until.callback(after_import(module, functools.partial(take, module, name)))


@contextlib.contextmanager
def _gpus_shown(num_gpus: int) -> Iterator[None]:
    """Within this block, the program counts `num_gpus` and CUDA_VISIBLE_DEVICES stays: many wrap only for several."""
    count, kind = torch.cuda.device_count, type(os.environ)
    set_one = kind.__setitem__

    def device_count() -> int:
        return count() if _asks() in ("torch", "ddpshim") else num_gpus

    def set_item(self: Any, name: Any, value: Any) -> None:
        if self is not os.environ or name != _VISIBLE or value == self.get(_VISIBLE):
            set_one(self, name, value)
        else:
            say_on_main(
                f"{users_line()}: {_VISIBLE}={value} was ignored: each rank has its own GPU. To choose "
                f"GPUs, set {_VISIBLE} for `ddpshim run`"
            )

    with replaced(torch.cuda, "device_count", device_count), replaced(kind, "__setitem__", set_item):
        yield


def _cores_shared(num_ranks: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the program gets at most a rank's share of the cores: on more, threads would wait."""
    original = torch.set_num_threads

    @functools.wraps(original)
    def set_num_threads(num: int) -> None:
        from ddpshim.process import machine

        original(num if num < 1 else min(num, max(1, machine.num_cores() // num_ranks)))

    return replaced(torch, "set_num_threads", set_num_threads)


_LAST_ANSWER_S = 0.2  # time for other ranks to read the last answer of the store, which the main rank hosts
_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_"),
    *("PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"),
)
_STRATEGIES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "TP")
_PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")


def _notice(start: Start, until: contextlib.ExitStack) -> None:
    """Until `until` ends, restart a program that creates a process group, or could and fails, or calls ddpshim."""
    is_initialized = dist.is_initialized

    def put(owner: Any, name: str, found: str) -> None:
        original: Any = getattr(owner, name, None)

        def instead(*args: Any, **kwargs: Any) -> Any:
            if _asks() == "ddpshim" or os.getpid() != start.process:
                return original(*args, **kwargs)
            leave_alone(start, found)

        if original is not None:
            until.enter_context(replaced(owner, name, instead))

    def is_shown() -> bool:
        """False for the program, which would otherwise divide work or writing among ranks by itself."""
        return _asks() in ("torch", "ddpshim") and is_initialized()

    def leave_if_it_joins(error: Exception) -> None:
        if not current().has_networks:  # it may need a launcher
            leave_alone(start, f"{error!r} in one process, and it can make a process group", error)

    if start.joins:
        start.at_failure = leave_if_it_joins
    for name in ("init_process_group", "init_device_mesh"):
        put(dist, name, f"it calls torch.distributed.{name}")
    until.enter_context(replaced(dist, "is_initialized", is_shown))
    for name in ("setup", "wrap_parallel", "make_loader"):
        put(sys.modules["ddpshim"], name, f"it calls ddpshim.{name}")
    until.callback(after_import("accelerate", lambda: _leave_what_accelerate_divides(start, until)))


def _asks() -> str:
    """Return the package that calls the stand-in which calls this."""
    return str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]


def _leave_what_accelerate_divides(start: Start, until: contextlib.ExitStack) -> None:
    """Until `until` ends, restart a program that has accelerate divide its model."""
    accelerator = sys.modules["accelerate.accelerator"].Accelerator
    make = accelerator.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        switches = [f"ACCELERATE_USE_{name}" for name in _STRATEGIES]
        asked = [name for name in switches if os.environ.get(name, "false").lower() in ("1", "true")]
        asked += [name for name in _PLUGINS if kwargs.get(name) is not None]
        if asked:
            leave_alone(start, f"accelerate divides its model ({', '.join(asked)})")
        make(self, *args, **kwargs)

    until.enter_context(replaced(accelerator, "__init__", made))


def leave_alone(start: Start, found: str, error: Optional[Exception] = None) -> NoReturn:
    """Restart this rank without changes to the program (collective). Raises SyncError if networks were wrapped.

    `error`: with which the program ended, if it did.
    """
    line = users_line(error=error)
    if current().has_networks:
        raise SyncError(
            f"{line}: {found}, after ddpshim has distributed it as a single-process program; both "
            f"would reduce gradients. Set {variables.UNEDITED}=off if the program distributes all its training "
            "itself; otherwise remove that call."
        )
    say_on_main(
        f"{line}: {found}, so the program distributes itself. ddpshim restarts it and leaves it "
        f"alone ({variables.UNEDITED}=off skips the restart)"
    )
    start.leave(True)
    os.chdir(start.folder)
    start.again({**start.environ, variables.UNEDITED: "off"})
