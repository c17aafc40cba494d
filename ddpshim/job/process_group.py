"""Makes the job's process group, or uses the program's, and ends what it has made.

Other modules use it only for networks: gradients, weights, buffers.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import inspect
import itertools
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any, Callable, Optional, Union

import torch
import torch.distributed as dist
from packaging.version import Version

from ddpshim.errors import LaunchError, OptionsError
from ddpshim.failures import failure, hang_detector
from ddpshim.job import shared_pdb
from ddpshim.job.world import World, has_group
from ddpshim.options import Options
from ddpshim.process import job_store
from ddpshim.process.devices import agree_on_backend, backend_of, bind_device
from ddpshim.process.job import Door, Job, current
from ddpshim.process.job import leave as leave_job
from ddpshim.process.launch_env import LaunchEnv
from ddpshim.process.say import count, say

# torch before 2.8 joins gloo's threads while it holds Python's lock (GIL), and a thread that frees its last message
# waits for that lock: `cleanup` would hang. With these versions groups are kept until the process ends.
ENDS_THREADS = Version(torch.__version__).release >= (2, 8)
_kept: list[Any] = []
_worlds = itertools.count(1)  # numbers of this process's worlds
_LAST_MESSAGE_S = 0.05
_ORDER = "the order of a set of strings"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_MMAP_ABOVE_BYTES = 32 * 2**20  # older releases of glibc accept no more
_MOST_KEPT_BYTES = 512 * 2**20


def keep_freed_memory() -> bool:
    """Make malloc keep up to 512 MB of freed memory; returns whether it does. Local.

    Otherwise glibc returns each step's tensors to the system, and the next step gets them back page by page: 7,000 page
    faults in a step of an LSTM on the CPU. Does nothing if the user has set malloc's variables, or with another malloc.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE_BYTES) and mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES))


def check_options(door: Door, options: Options) -> None:
    """Raise OptionsError for options that cannot do behind `door` what they say. Local."""
    if not door.computes_alike and options.exact is not None:
        raise OptionsError(
            f"exact={options.exact} with local batches: a mean over a local batch is rounded by its size, so bits "
            'would depend on the number of ranks. Call ddpshim.setup(batch="global"), or start the unmodified '
            "single-process program by `python -m ddpshim run`."
        )
    if not door.computes_alike and options.rows_at_once is not None:
        raise OptionsError(
            f"rows_at_once={options.rows_at_once} with local batches: it would do nothing. Start the unmodified "
            'program by `python -m ddpshim run`, or call ddpshim.setup(batch="global").'
        )
    for name in ("per_rank_batch", "lr_rule") if door.computes_alike else ():
        if name in options.changed():
            raise OptionsError(
                f"{name}={getattr(options, name)}: the program holds the global batch, as in a single process, so the "
                "option would do nothing. Leave it out; batch sizes per rank are for ddpshim.setup(), make_loader and "
                "wrap_parallel (`python -m ddpshim docs MIGRATION`)."
            )


def join(
    job: Job,
    env: Optional[LaunchEnv],
    options: Options,
    backend: Optional[str],
    device: Union[str, torch.device, None],
    timeout_s: float,
    side_timeout_s: float,
) -> World:
    """Return the World of a launched process, in a new group; in the program's own if `env` is None (collective).

    Raises what `setup` raises.
    """
    if env is None:
        rank, world_size, backend = dist.get_rank(), dist.get_world_size(), str(dist.get_backend())
        job.store = dist.PrefixStore(f"ddpshim/{next(_worlds)}", dist.distributed_c10d._get_default_store())
    else:
        rank, world_size, bound = env.rank, env.world_size, bind_device(env.rank, env.local_rank, device)
        backend = _make_group(job, env, options.guard, backend, bound, timeout_s)
    if env is None or world_size > 1:  # a single rank needs none, and a thread of gloo would wake up 100 times a second
        job.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=side_timeout_s))
    launcher = "adopted" if env is None else env.launcher
    made = World(rank=rank, world_size=world_size, backend=backend, launcher=launcher, options=options, _job=job)
    if env is None:
        hosts = made.gather(socket.gethostname())
        local = [other for other in range(world_size) if hosts[other] == hosts[rank]]
        if device is None and torch.cuda.is_available() and (backend == "nccl" or torch.cuda.is_initialized()):
            device = torch.device("cuda", torch.cuda.current_device())  # the program has chosen it
        bound = bind_device(rank, local.index(rank), device)
        place = local.index(rank), len(local), [*dict.fromkeys(hosts)].index(hosts[rank])
    else:
        place = env.local_rank, env.local_world_size, env.node_rank
    made = replace(made, local_rank=place[0], local_world_size=place[1], node_rank=place[2], device=bound)
    keep_freed_memory()
    if world_size > 1 and options.guard and hasattr(job.store, "clone"):
        # For the thread that watches, so that the rank's own waits do not block it. Before a collective: after it the
        # main rank, which may serve the store, may end.
        job.second_store = job.store.clone()
        job.second_store.set_timeout(timedelta(seconds=hang_detector.STORE_S))
    _check_same_options(made)
    return made


def begin(job: Job, made: World, timeout_s: float, cleanup: Callable[[], None]) -> None:
    """Watch over the ranks from now on, and say on the main rank what was decided. Local."""
    if made.world_size > 1:
        atexit.unregister(_leave)
        atexit.register(_leave, os.getpid(), cleanup)  # before the watch and others register theirs: it runs last
        failure.begin_checks()
        failure.arm(job, hang_detector.begin(job, made, timeout_s) if made.options.guard else None)
        shared_pdb.share(job.at_end)
    if made.is_main:
        nodes, odd = divmod(made.world_size, made.local_world_size)
        several = "several machines, not equally many on each" if odd else f"{nodes} machines"
        where = "this machine" if made.world_size == made.local_world_size else several
        device = "GPU" if made.device.type == "cuda" else made.device.type.upper()
        say(f"{count(made.world_size, 'rank')} on {where}, {device} ({made.launcher}, {made.backend})")
        if made.options.changed():
            say(f"options {made.options}")


def leave(ended: Job, made: World) -> None:
    """Leave the job `ended`, whose world was `made`; see `ddpshim.cleanup`. Local."""
    atexit.unregister(_leave)
    failing = failure.on_the_way_out()
    leave_job(ended)  # where that raises, this process stays armed
    if not failing:
        failure.disarm(current())
    elif made.backend == "nccl":
        return
    # In an adopted group the control group ends with the user's group, which the user destroys.
    if ended.group is not None and has_group() and dist.group.WORLD is ended.group:
        if not ENDS_THREADS:
            _kept.extend((ended.group, ended.control))
            time.sleep(_LAST_MESSAGE_S)  # so that gloo's threads get the GIL to free their last messages
        dist.destroy_process_group()
        # gloo's threads end with the last reference to their group, so drop it now: a thread that frees its last
        # message while Python shuts down needs the GIL, and aborts the process ("terminate called without an active
        # exception").
        ended.control = None
    ended.group = None


def _leave(process: int, cleanup: Callable[[], None]) -> None:
    """End gloo's threads if a program ends without `cleanup`: one that is alive when Python ends may abort it. Local:
    no rank waits for another. `process` called `setup`; a fork of it has none of these threads.
    """
    job = current()
    if job.world is None or os.getpid() != process or job.is_failing() or not has_group():
        return
    if job.group is not None and job.world.backend != "nccl":
        job.before_end.pop_all()  # it compares ranks
        cleanup()
    elif job.control is not None and ENDS_THREADS:  # the other group is the program's, or nccl's: see `cleanup`
        control, job.control = job.control, None
        dist.destroy_process_group(control)


def _check_same_options(made: World) -> None:
    """Raise OptionsError, on all ranks, if they were given different options (collective)."""
    everyones = made.gather({**vars(made.options), _ORDER: hash(_ORDER)})
    for name in vars(made.options):
        values = [options.get(name) for options in everyones]
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            raise OptionsError(
                f"option {name} is {values[0]!r} on rank 0 and {values[odd]!r} on rank {odd}; ranks would train "
                "differently, or hang. Give every rank the same variables and config."
            )
    if made.is_main and len({options[_ORDER] for options in everyones}) > 1:
        say(
            "the order of a set of strings differs between ranks, so anything numbered by it (such as classes) "
            "does too. Sort the set, or set PYTHONHASHSEED=0 before Python starts (`python -m ddpshim run` does)"
        )


def _make_group(
    job: Job, env: LaunchEnv, is_guarded: bool, backend: Optional[str], bound: torch.device, timeout_s: float
) -> str:
    """Join the store, agree on a backend, and make the group; return the backend (collective)."""
    if backend == "nccl" and bound.type != "cuda":
        raise LaunchError(
            f"backend='nccl' but rank {env.rank} computes on {bound}; nccl only handles GPU memory, so the first "
            "collective would fail. Leave backend= out, or give the rank a GPU."
        )
    # The store still holds the keys of an earlier world of this process: each world has its own prefix.
    store = job_store.meet(env, f"ddpshim/{next(_worlds)}", timeout_s)
    backend = backend or backend_of(bound) or agree_on_backend(store, env.rank, env.world_size, bound)
    # The default arguments of this module keep the group that exists at its import (by torch's DDP): import it before.
    importlib.import_module("torch.distributed.nn.functional")
    if backend == "nccl" and is_guarded:
        # torch's watchdog kills the process without naming the missing rank: `watch` must end the job earlier.
        timeout_s += hang_detector.NCCL_GRACE_S
    # With device_id, nccl creates its communicator now: if that cannot work (two ranks on one GPU, no connection),
    # `setup` fails and not the first collective. Other groups are split from this communicator, which saves memory.
    takes_device = "device_id" in inspect.signature(dist.init_process_group).parameters  # torch 2.3 and later
    of_device: dict[str, Any] = {"device_id": bound} if backend == "nccl" and takes_device else {}
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s),
        **of_device,
    )
    job.group, job.timeout, job.store = dist.group.WORLD, timedelta(seconds=timeout_s), store
    return backend
