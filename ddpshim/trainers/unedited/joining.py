"""Runs a program for one process as a rank: joins the job, and replaces names of torch until the program ends.

Every rank runs the whole program. Networks are wrapped when they first train; batches are row tensors (`ddpshim.rows`).
See docs/run.md.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch.utils import data as torch_data

from ddpshim import variables
from ddpshim.errors import OptionsError
from ddpshim.failures import unsynced_check
from ddpshim.job.group import cleanup, setup, world
from ddpshim.job.noise import draws_alike
from ddpshim.job.world import World
from ddpshim.process.job import Job, current
from ddpshim.process.observed import observe
from ddpshim.process.replaced import noted, replaced
from ddpshim.process.say import say_on_main
from ddpshim.process.users_line import users_line
from ddpshim.rows import calls
from ddpshim.rows.loader import DataLoader
from ddpshim.rows.tensor import Counts
from ddpshim.trainers.unedited import hand_back
from ddpshim.trainers.unedited.clock import Clock, Commands
from ddpshim.trainers.unedited.networks import Steps, say_what_was_divided
from ddpshim.trainers.unedited.private_files import PrivateFiles
from ddpshim.trainers.unedited.program import Start
from ddpshim.trainers.unedited.reads import equal_reads
from ddpshim.trainers.unedited.rollouts import Rollouts
from ddpshim.trainers.unedited.unmanaged_paths import Locks

_VISIBLE = "CUDA_VISIBLE_DEVICES"


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
    """Join the job until `cleanup()` or the end of the program, which calls this (collective). See `setup`."""
    here, job, until = _set_up(**given), current(), contextlib.ExitStack()
    with noted() as stand_ins:
        until.enter_context(_as_one_program(here))
    until.enter_context(stand_ins.where_imported())
    job.before_end.callback(_say_goodbye)
    job.at_end.callback(until.close)
    atexit.register(_leave, job, os.getpid())
    return here


def _leave(job: Job, process: int) -> None:
    """Leave the job at the end of a program that does not call `cleanup()` (collective)."""
    if job is current() and os.getpid() == process and not job.is_failing():
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
    """Call `setup`; a program without a seed gets one, as ranks must be equal: weights, data splits (collective)."""
    see_one_gpu(int(os.environ.get("LOCAL_RANK", 0)))
    current().holds_whole_batches = True
    try:
        here = setup(seed=seed, **given)
    except BaseException:
        current().holds_whole_batches = False
        raise
    if seed is None:
        here = setup(seed=here.broadcast(int(os.environ.get(variables.SEED) or secrets.randbits(62))))
    if not draws_alike():
        raise OptionsError(
            f"noise={here.options.noise}: a program that every rank runs whole draws its data splits and evaluations "
            "on each rank, and these would differ. Leave the option out."
        )
    for name in ("per_rank_batch", "lr_rule"):
        if name in here.options.changed():
            raise OptionsError(
                f"{name}={getattr(here.options, name)}: the program holds whole batches and draws what one process "
                "draws, so it would do nothing. Leave the option out."
            )
    return here


@contextlib.contextmanager
def _as_one_program(here: World, start: Optional[Start] = None) -> Iterator[None]:
    """Within this block the ranks run one program. It is left alone if it distributes itself, if `start` is given."""
    steps, rollouts, counts = current().part(Steps), Rollouts(here), current().part(Counts)
    locks = Locks()

    def is_apart() -> bool:
        return rollouts.is_playing or is_reading() or locks.held() != ""

    def is_reading() -> bool:
        # Only in the main thread: a file that another thread saves meanwhile is a checkpoint, not a dataset's cache.
        return counts.is_fetching and threading.current_thread() is threading.main_thread()

    with contextlib.ExitStack() as undo:
        for module in (torch_data, torch_data.dataloader):
            undo.enter_context(replaced(module, "DataLoader", DataLoader))
        undo.enter_context(_optimizers_seen())
        if here.options.exact is None:  # whose number of threads must not depend on the number of ranks
            undo.enter_context(_cores_shared(here.local_world_size))
        undo.enter_context(_one_process_shown())

        def take_back() -> None:
            undo.close()
            if here.world_size > 1:
                files.remove_new()

        if start is not None:
            start.take_back = take_back
            undo.enter_context(hand_back.noticed(start))
            start.at_failure += [explain_taken, functools.partial(hand_back.leave_alone_if_it_joins, start)]
        if here.world_size > 1:
            since = time.time() if start is None else start.time
            counts.lock = locks.held
            files, clock = PrivateFiles(here, since, is_reading), Clock(here, is_apart)
            for part in (files, clock, Commands(clock, files)):
                undo.enter_context(part.installed())
            undo.enter_context(rollouts.on_main(files.apart))
            current().part(unsynced_check.Answer).is_settled = True
            observe(undo, backward=steps.begin_pass, before_step=steps.note_step)
            undo.enter_context(locks.installed())
            undo.enter_context(equal_reads(here, is_apart))
        if here.world_size > 1 or here.options.exact is not None:
            undo.enter_context(calls.installed())
        if here.options.exact is not None:
            from ddpshim.rows import pieces

            undo.enter_context(pieces.installed())
        if here.device.type == "cuda":
            undo.enter_context(_gpus_shown(here.local_world_size))
        yield


@contextlib.contextmanager
def _gpus_shown(num_gpus: int) -> Iterator[None]:
    """Within this block, `device_count()` is `num_gpus` for the program, but not for torch. Local.

    Many programs wrap their network only if there are several. Changes of CUDA_VISIBLE_DEVICES are ignored.
    """
    count, kind = torch.cuda.device_count, type(os.environ)
    set_one = kind.__setitem__

    def device_count() -> int:
        asks = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        return count() if asks in ("torch", "ddpshim") else num_gpus

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


@contextlib.contextmanager
def _one_process_shown() -> Iterator[None]:
    """Within this block the program finds no variables of a launcher. Local."""
    rank = os.environ.get("RANK", "0")
    with hand_back.in_one_process():
        os.environ[variables.RANK] = rank
        try:
            yield
        finally:
            del os.environ[variables.RANK]


@contextlib.contextmanager
def _cores_shared(num_ranks: int) -> Iterator[None]:
    """Within this block the program gets at most a rank's share of the cores for its threads. Local.

    On more, the ranks' threads wait for each other in each operation. (robomimic sets two threads.)
    """
    original = torch.set_num_threads

    @functools.wraps(original)
    def set_num_threads(num: int) -> None:
        from ddpshim.process import machine

        original(num if num < 1 else min(num, max(1, machine.num_cores() // num_ranks)))

    with replaced(torch, "set_num_threads", set_num_threads):
        yield


@contextlib.contextmanager
def _optimizers_seen() -> Iterator[None]:
    add = torch.optim.Optimizer.add_param_group

    @functools.wraps(add)
    def add_param_group(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        add(self, *args, **kwargs)
        steps = current().part(Steps)
        steps.networks.take_note(self)
        steps.num_passes = 0

    with replaced(torch.optim.Optimizer, "add_param_group", add_param_group):
        try:
            yield
        finally:
            current().part(Steps).networks.forget()


def explain_taken(error: Optional[BaseException]) -> None:
    """Say in an error of a taken port or name of shared memory that every rank opens it. Local."""
    while error is not None:
        opened = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
        is_memory = isinstance(error, FileExistsError) and opened == ["multiprocessing.shared_memory"]
        if isinstance(error, OSError) and (is_memory or error.errno == errno.EADDRINUSE):
            error.strerror = (
                f"{error.strerror}: every rank runs this line, and another rank (or program) of this machine has "
                f"opened the same port or name. Open it only if os.environ.get('{variables.RANK}', '0') is '0', or "
                "leave the choice to the system: port 0, shared memory without a name"
            )
        error = error.__cause__ or error.__context__
