"""Creates the job's process group, once, in `setup()`, and returns it as a frozen `World`.

Other modules use torch's process group only for networks: gradients, weights, buffers.
"""

from __future__ import annotations

import atexit
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

from ddpshim.errors import LaunchError, OptionsError, WorldError
from ddpshim.job import failure, freed_memory, messages, rendezvous, unshared, watch
from ddpshim.job.alike import compute_alike
from ddpshim.job.debugging import tell_all
from ddpshim.job.devices import agree_on_backend, backend_of, bind_device, limit_memory, single_device
from ddpshim.job.job import Job, begin_next, current
from ddpshim.job.launch_env import LaunchEnv, read_launch_env, read_num_restarts
from ddpshim.job.precision import check_first_step
from ddpshim.job.random_streams import derive_seed, seed_everything, seed_own_streams
from ddpshim.job.say import count, say
from ddpshim.job.world import World
from ddpshim.options import Options, names

# torch before 2.8 joins gloo's threads while it holds Python's lock (GIL), and a thread that frees its last message
# waits for that lock: `cleanup` would hang. With these versions groups are kept until the process ends.
ENDS_THREADS = Version(torch.__version__).release >= (2, 8)
_kept: list[Any] = []
_worlds = itertools.count(1)  # numbers of this process's worlds
_LAST_MESSAGE_S = 0.05
_ORDER = "the order of a set of strings"


def world() -> World:
    """Return the current World: the one that `setup()` made, else that of a single process. Local; starts nothing.

    After `cleanup()` it is the last World, so the rank stays known. Raises WorldError if a launcher started this
    process and `setup()` was not called: each rank would act as the only one.
    """
    job = current()
    if job.world is not None or job.left is not None:
        return job.world or job.left  # type: ignore[return-value]
    if _has_group() or read_launch_env(os.environ).is_launched:
        raise WorldError(
            "ddpshim.world() was called before ddpshim.setup() in a launched process; every rank would act as the "
            "only one. Call ddpshim.setup() first."
        )
    return World(device=single_device())


def has_world() -> bool:
    """Return whether `setup` was called in this process, without a later `cleanup`. Local."""
    return current().world is not None


def current_or_new_world() -> World:
    """Return the current World; calls `setup()` if nothing has yet (then collective)."""
    return current().world or setup()


def setup(
    *,
    rank: Optional[int] = None,
    world_size: Optional[int] = None,
    local_rank: Optional[int] = None,
    local_world_size: Optional[int] = None,
    master_addr: Optional[str] = None,
    master_port: Optional[int] = None,
    backend: Optional[str] = None,
    device: Union[str, torch.device, None] = None,
    timeout_s: Optional[float] = None,
    side_timeout_s: Optional[float] = None,
    seed: Optional[int] = None,
    options: Optional[Options] = None,
    batch: str = "local",
) -> World:
    """Return the World of this process; joins the job that the launcher's variables (or arguments) describe.

    Collective under a launcher; in a plain `python train.py` it starts nothing. Reads the environment once and never
    changes it (except for the option debug). Uses an existing process group if the program made one. Calling it again
    returns the same World.

    Args:
        rank, world_size, local_rank, local_world_size, master_addr, master_port: this process's place in the job,
            instead of the launcher's variables; `rank` and `world_size` only together.
        backend: torch's name; default nccl if each rank has its own GPU, else gloo.
        device: this rank's device; default its own GPU, else the CPU. "cuda" selects the rank's GPU.
        timeout_s: how long a rank waits for peers in the rendezvous and in a training collective.
        side_timeout_s: how long ranks wait in World's own collectives while one rank works alone.
        seed: seeds torch, numpy and random *equally* on all ranks. Their generators stay equal (option noise): for a
            batch of `make_loader` each rank takes its rows of the noise drawn for the whole batch.
        options: the run's options; default `Options.read()`, from DDPSHIM_* variables.
        batch: what the program holds. "local": this rank's share of a batch, from `make_loader`, as with DDP.
            "global": the whole batch, as with `nn.DataParallel`: loader, loss, metrics and files stay as they are in
            one process, and networks compute on this rank's rows (docs/any_trainer.md). Call it before anything else.

    Raises:
        LaunchError: launch variables are missing, malformed or contradictory, or the port is in use.
        OptionsError: options are wrong, or differ between ranks.
        WorldError: called again with arguments that contradict the first call.
    """
    given = {name: value for name, value in locals().items() if name != "batch"}
    place = {name: given[name] for name in ("rank", "world_size", "local_rank", "local_world_size")}
    master = {name: given[name] for name in ("master_addr", "master_port")}
    asked: dict[str, Any] = {**place, "backend": backend, "device": device, "seed": seed, "options": options}
    job = current()
    if batch not in ("local", "global"):
        raise OptionsError(f"setup(batch={batch!r}): what the program holds is unclear. Use local or global.")
    if job.world is not None:
        if batch == "global" and job.world.is_launched and not job.holds_whole_batches:
            raise WorldError(
                'setup(batch="global") after setup(): what was built since holds this rank\'s share of a batch. Give '
                "batch to the first call."
            )
        return _reuse(job, job.world, asked)
    if batch == "global" and (_has_group() or read_launch_env(os.environ, **place, **master).is_launched):
        return importlib.import_module("ddpshim.trainers.unedited.joining").join_edited(**given)  # type: ignore[no-any-return]
    settle_rounding()
    options = Options.read() if options is None else options
    if options.debug:
        tell_all()
    timeout_s = options.timeout_s if timeout_s is None else timeout_s
    side_timeout_s = options.side_timeout_s if side_timeout_s is None else side_timeout_s
    if _has_group():
        made = replace(_adopt(job, device, side_timeout_s), options=options)
        _check_same(made, {**asked, "backend": backend or options.backend})
    else:
        env = read_launch_env(os.environ, **place, **master)
        if env.is_launched:
            backend = backend or options.backend
            made = _join(job, env, backend, device, timeout_s, side_timeout_s, is_watched=options.guard)
            made = replace(made, options=options)
        else:
            made = World(device=single_device(device), options=options, _job=job)
            if env.in_allocation:
                say(str(env.reason))
    if made.is_launched:
        freed_memory.keep(os.environ)
    _check_same_options(made)
    if options.max_memory_per_gpu_gb is not None:
        limit_memory(made.device, options.max_memory_per_gpu_gb)
    if options.exact is not None:
        compute_alike(made, options.exact)
    job.world, job.left = replace(made, seed=seed, num_restarts=read_num_restarts(os.environ)), None
    if options.logs is not None:
        from ddpshim.job.rank_log import copy_output

        on_cleanup(copy_output(options.logs, made.rank))
    if seed is not None:
        seed_everything(seed)
    check_first_step(options, job)
    if made.world_size > 1:
        atexit.unregister(_leave)
        atexit.register(_leave, os.getpid())  # before the watch and other parts register theirs, so that it runs last
        unshared.begin()
        failure.arm(made.rank, job.store, made.world_size)
        if options.guard:
            watch.begin(job, made.rank, made.world_size, timeout_s, gets_no_errors=made.backend == "nccl")
    if made.is_launched and made.is_main:
        nodes, odd = divmod(made.world_size, made.local_world_size)
        spread = "unequal nodes" if odd else f"{count(nodes, 'node')} x {made.local_world_size}"
        decided = f"world of {made.world_size} ({made.launcher}, {spread}), {made.backend} on {made.device.type}"
        say(decided)
        if options != Options():
            say(f"options {options}")
    return job.world


def settle_rounding() -> None:
    """Make MKL choose now how it rounds tanh, sin, exp and the like, so that this process rounds as the others do.
    Local.

    On some machines a process's first such call is sometimes rounded differently from all later ones: on two virtual
    cores in 26 of 500 processes (`python -m tests.first_rounding`). Without MKL nothing changes.
    """
    for dtype in (torch.float32, torch.float64):
        torch.tanh(torch.zeros(16, dtype=dtype, device="cpu"))  # the default device may be another


def cleanup() -> None:
    """Leave the job: undo what `setup()` made, and nothing that the user made.

    Local. Idempotent; safe in `finally`. While an exception propagates, `ddpshim.abort` still reports it, and an nccl
    group stays until the process ends, since its teardown would wait for other ranks.
    """
    ended = current()
    made, ended.world = ended.world, None
    if made is None:
        return
    atexit.unregister(_leave)
    ended.left = made
    failing = failure.on_the_way_out()
    try:
        ended.end()
    except BaseException:
        failing = True
        raise
    finally:
        begin_next()
        current().left, ended.left = made, None
        if failing:
            current().watched = ended.watched
    if failing and made.backend == "nccl":
        return
    if not failing:
        failure.disarm(ended)
    # In an adopted group the control group ends with the user's group, which the user destroys.
    if ended.group is not None and _has_group() and dist.group.WORLD is ended.group:
        if not ENDS_THREADS:
            _kept.extend((ended.group, ended.control))
            time.sleep(_LAST_MESSAGE_S)  # so that gloo's threads get the GIL to free their last messages
        dist.destroy_process_group()
        # gloo's threads end with the last reference to their group, so drop it now: a thread that frees its last
        # message while Python shuts down needs the GIL, and aborts the process ("terminate called without an active
        # exception").
        ended.control = None
    ended.group = None


def _leave(process: int) -> None:
    """End gloo's threads if a program ends without `cleanup`: one that is alive when Python ends may abort it.

    Local: it compares nothing, so that a rank that ends by `sys.exit` waits for no other. `process` called `setup`; a
    fork of it has none of these threads.
    """
    job = current()
    if job.world is None or os.getpid() != process or job.is_failing() or not _has_group():
        return
    if job.group is not None and job.world.backend != "nccl":
        job.before_end.pop_all()  # it compares ranks
        cleanup()
    elif job.control is not None and ENDS_THREADS:  # the other group is the program's, or nccl's: see `cleanup`
        control, job.control = job.control, None
        dist.destroy_process_group(control)


def draws_alike() -> bool:
    """Return whether ranks draw what one process would, because their batches are shares of its batches. Local."""
    here = world()
    return _wants_one_process(here.options) and (here.world_size == 1 or not current().has_own_batches)


def _wants_one_process(options: Options) -> bool:
    return options.order == "torch" and options.noise != "per_rank"


def split_random_streams() -> None:
    """Give every rank its own random streams: noise, timesteps and dropout differ between ranks from now on.

    Local. Does nothing the second time, without a launcher, or if ranks draw what one process would (option noise). The
    streams derive from `setup`'s seed, else from torch's. Call it after all networks are built; `wrap_parallel` does.
    """
    here, job = world(), current()
    job.has_networks = True
    if job.is_split or not here.is_launched or draws_alike():
        return
    job.is_split = True
    if _wants_one_process(here.options) and here.is_main:
        return  # the main rank keeps the streams of one process
    base = here.seed if here.seed is not None else torch.initial_seed()
    seed_own_streams(derive_seed(base, "rank", here.rank))


def use_own_batches() -> None:
    """Record that ranks train on batches that are not shares of one process's: each gets its own random streams. Local.

    It gets them now if a network is wrapped already, else when the first one is.
    """
    job = current()
    job.has_own_batches = True
    if job.has_networks:
        split_random_streams()


def new_group(backend: Optional[str] = None) -> Any:
    """Return another process group of all ranks, with the first one's timeout and default backend (collective)."""
    timeout = current().timeout
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    return dist.new_group(backend=backend, **options)


def on_cleanup(callback: Callable[[], None]) -> None:
    """Make `cleanup()` call this; calls run in reverse order. Local."""
    current().at_end.callback(callback)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _reuse(job: Job, made: World, asked: dict[str, Any]) -> World:
    """Return the existing World, with `seed` if it had none; raise WorldError if the arguments contradict it."""
    seed = asked["seed"]
    if seed is None or made.seed is not None:
        _check_same(made, asked)
        return made
    if job.is_split:
        raise WorldError(
            f"setup(seed={seed}) after the ranks got their own random streams: networks were built without that "
            "seed, and every rank would now draw the same noise. Give the seed to the first setup()."
        )
    made = replace(made, seed=seed)
    _check_same(made, asked)
    job.world = made
    seed_everything(seed)
    return made


def _check_same(made: World, asked: dict[str, Any]) -> None:
    """Raise WorldError if arguments of `setup` contradict the existing world."""
    for name, value in asked.items():
        existing = getattr(made, name)
        if name == "device" and value is not None:
            value = torch.device(value)
            existing = existing if value.index is not None else torch.device(existing.type)
        if None not in (value, existing) and value != existing:
            raise WorldError(
                f"setup({name}={str(value)!r}), but there is a world with {name}={str(existing)!r} already: one part "
                "of the program would rely on the one, another part on the other. Call setup once, or cleanup() "
                "before the second call."
            )


def _check_same_options(made: World) -> None:
    """Raise OptionsError, on all ranks, if they were given different options (collective)."""
    everyones = made.gather({**{name: getattr(made.options, name) for name in names()}, _ORDER: hash(_ORDER)})
    for name in names():
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


def _join(
    job: Job,
    env: LaunchEnv,
    backend: Optional[str],
    device: Union[str, torch.device, None],
    timeout_s: float,
    side_timeout_s: float,
    is_watched: bool,
) -> World:
    """Bind the device, join the store, agree on a backend, and create the two groups (collective)."""
    bound = bind_device(env.rank, env.local_rank, device)
    if backend == "nccl" and bound.type != "cuda":
        raise LaunchError(
            f"backend='nccl' but rank {env.rank} computes on {bound}; nccl only handles GPU memory, so the first "
            "collective would fail. Leave backend= out, or give the rank a GPU."
        )
    # The store still holds the keys of an earlier world of this process: each world has its own prefix.
    store = rendezvous.meet(env, f"ddpshim/{next(_worlds)}", timeout_s)
    backend = backend or backend_of(bound)
    if backend is None:
        backend = agree_on_backend(store, env.rank, env.world_size, bound)
    # The default arguments of this module keep the group that exists at its import (by torch's DDP): import it before.
    importlib.import_module("torch.distributed.nn.functional")
    if backend == "nccl" and is_watched:
        # torch's watchdog kills the process without naming the missing rank: `watch` must end the job earlier.
        timeout_s += watch.NCCL_GRACE_S
    # With device_id, nccl creates its communicator now: if that cannot work (two ranks on one GPU, no connection),
    # `setup` fails and not the first collective. Other groups are split from this communicator, which saves memory.
    takes_device = "device_id" in inspect.signature(dist.init_process_group).parameters  # torch 2.3 and later
    options: dict[str, Any] = {"device_id": bound} if backend == "nccl" and takes_device else {}
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s),
        **options,
    )
    job.group, job.timeout, job.store = dist.group.WORLD, timedelta(seconds=timeout_s), store
    if env.world_size > 1:  # a single rank needs none, and a thread of gloo would wake up 100 times a second
        job.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=side_timeout_s))
    return World(
        rank=env.rank,
        local_rank=env.local_rank,
        world_size=env.world_size,
        local_world_size=env.local_world_size,
        node_rank=env.node_rank,
        device=bound,
        backend=backend,
        launcher=env.launcher,
        _job=job,
    )


def _adopt(job: Job, device: Union[str, torch.device, None], side_timeout_s: float) -> World:
    """Return a World for the process group that the user made; only the control group is ddpshim's (collective)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    job.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=side_timeout_s))
    hosts = messages.gather(socket.gethostname(), size, job.control, False, "setup")
    local = [other for other in range(size) if hosts[other] == hosts[rank]]
    first_seen = list(dict.fromkeys(hosts))
    backend = str(dist.get_backend())
    if device is None and torch.cuda.is_available() and (backend == "nccl" or torch.cuda.is_initialized()):
        device = torch.device("cuda", torch.cuda.current_device())  # the program has chosen it
    job.store = dist.PrefixStore(f"ddpshim/{next(_worlds)}", dist.distributed_c10d._get_default_store())
    return World(
        rank=rank,
        local_rank=local.index(rank),
        world_size=size,
        local_world_size=len(local),
        node_rank=first_seen.index(hosts[rank]),
        device=bind_device(rank, local.index(rank), device),
        backend=backend,
        launcher="adopted",
        _job=job,
    )
