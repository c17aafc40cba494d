"""Makes this job's process group once, in `setup()`, and describes it by a frozen `World`.

Other modules call torch's process group for networks alone: gradients, weights, buffers.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Callable, Optional, TypeVar, Union

import torch
import torch.distributed as dist
from packaging.version import Version

from ddpshim.errors import LaunchError, OptionsError, WorldError
from ddpshim.job import failure, meter, rendezvous
from ddpshim.job.devices import agree_on_backend, bind_device, single_device
from ddpshim.job.launch_env import LaunchEnv, read_launch_env, read_num_restarts
from ddpshim.job.random_streams import derive_seed, seed_everything, seed_own_streams
from ddpshim.job.reduction import reduce, to_cpu
from ddpshim.job.say import count, say
from ddpshim.options import Options, names

T = TypeVar("T")
# torch before 2.8 joins gloo's threads with Python's lock in its hand, and one of them that lets go of its last message
# waits for that lock: `cleanup` would hang. There groups are kept, and their threads live as long as the process.
ENDS_THREADS = Version(torch.__version__).release >= (2, 8)
_kept: list[Any] = []
_LAST_MESSAGE_S = 0.05


@dataclass(frozen=True)
class World:
    """What one process knows of its job. Get it from `setup()`, later from `ddpshim.world()`.

    The collectives (`barrier`, `mean`, `sum`, `gather`, `broadcast`, `run_on_main`) must be reached by
    every rank and carry Python values over a CPU group of their own, so numbers stay exact and
    a rank may work alone for `side_timeout_s` (a rollout, a save) while its peers wait. In one process
    they return at once.

    Attributes:
        rank: this process's number among all, 0 to `world_size` - 1.
        local_rank: its number among those of its node, 0 to `local_world_size` - 1.
        node_rank: the number of its node.
        device: where it computes.
        backend: torch's name of what carries gradients; None where there is no group.
        launcher: what started the job, "none" in a plain `python train.py`.
        seed: that of `setup`.
        num_restarts: how often a launcher or scheduler has started this job before.
        options: the `Options` of the run.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: Optional[str] = None
    launcher: str = "none"
    seed: Optional[int] = None
    num_restarts: int = 0
    options: Options = field(default_factory=Options, repr=False)
    _control: Any = field(default=None, repr=False, compare=False)

    @property
    def is_restarted(self) -> bool:
        """Whether a launcher or scheduler has started this job before (torchrun --max-restarts, SLURM's requeue)."""
        return self.num_restarts > 0

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints, writes and decides: global rank 0."""
        return self.rank == 0

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process, also as a world of one (torchrun --nproc_per_node=1)."""
        return self.launcher != "none"

    def autocast(self) -> Any:
        """A context that computes in the precision of `options`, for forward and loss. Local.

        Weights, gradients and optimizers stay float32. No cast of a weight is kept: an optimizer may step inside.
        """
        if self.options.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _peers(self) -> Any:
        if self._control is None:
            raise WorldError(
                f"rank {self.rank} of {self.world_size} left its job with cleanup(); nobody answers a collective any "
                "more. Call cleanup() last."
            )
        return self._control

    def barrier(self) -> None:
        """Wait until every rank is here; patient enough for side work on one rank (collective)."""
        if self.world_size > 1:
            self.gather(None)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank (collective). Values are pickled."""
        if self.world_size == 1:
            return [value]
        out: list[Any] = [None] * self.world_size
        with meter.counted("communication"):
            dist.all_gather_object(out, value, group=self._peers())
        return out

    def broadcast(self, value: T, src: int = 0) -> T:
        """The value of rank `src`, on every rank (collective). Other ranks' arguments are ignored.

        Raises WorldError where `src` is no rank of this world.
        """
        if not 0 <= src < self.world_size:
            raise WorldError(
                f"broadcast from src={src} in a world of {self.world_size}; nobody would send and every rank "
                f"would wait. Use a rank from 0 to {self.world_size - 1}."
            )
        if self.world_size == 1:
            return value
        box: list[Any] = [value]
        with meter.counted("communication"):
            dist.broadcast_object_list(box, src=src, group=self._peers())
        return box[0]  # type: ignore[no-any-return]

    def sum(self, value: Any) -> Any:
        """The sum over ranks (collective) of a number, a tensor, or a mapping of these.

        Integers add exactly, floats with one rounding (math.fsum), tensors in float64 or int64.
        Raises WorldError where ranks hold different keys or shapes, or something that does not add.
        """
        return reduce(self.gather(to_cpu(value)), mean=False, like=value)

    def mean(self, value: Any) -> Any:
        """The mean over ranks (collective); see `sum`. A mean of integers is a float."""
        return reduce(self.gather(to_cpu(value)), mean=True, like=value)

    def count(self, name: str, by: int = 0) -> int:
        """What all ranks have added to the counter `name` so far, `by` included. Local: waits for nobody.

        Counters start at 0 in each world that `setup()` makes. For progress, and for news of a failure.
        """
        if _state.store is None:
            _state.store = dist.HashStore()
        return int(_state.store.add(f"count/{name}", by))

    def begin_gather(self, numbers: list[int]) -> Callable[[float], list[list[int]]]:
        """Send whole numbers to every rank without waiting; the result, called, waits for those of all (collective).

        It takes the seconds that it may wait, and raises RuntimeError when they have passed.
        """
        if self.world_size == 1:
            return lambda deadline_s: [numbers]
        mine = torch.tensor(numbers, dtype=torch.int64)
        everyones = [torch.empty_like(mine) for _ in range(self.world_size)]
        work = dist.all_gather(everyones, mine, group=self._peers(), async_op=True)

        def result(deadline_s: float) -> list[list[int]]:
            work.wait(timedelta(seconds=deadline_s))
            return [numbers.tolist() for numbers in everyones]

        return result

    def meet(self, name: str, value: T, deadline_s: float) -> dict[int, T]:
        """The values of the ranks that come here within the deadline, by rank. Never hangs (collective)."""
        if self.world_size == 1:
            return {0: value}
        name = f"{name}/{next_number(f'meet/{name}')}"
        _state.store.set(f"meet/{name}/{self.rank}", pickle.dumps(value))
        end, came = time.monotonic() + deadline_s, {self.rank: value}
        for rank in set(range(self.world_size)) - {self.rank}:
            key = f"meet/{name}/{rank}"
            # A moment for each also after the end: one rank that stays away must not hide those that are here.
            with contextlib.suppress(RuntimeError, ValueError):  # torch's DistStoreError, or what older versions raise
                _state.store.wait([key], timedelta(seconds=max(0.1, end - time.monotonic())))
                came[rank] = pickle.loads(_state.store.get(key))
        return dict(sorted(came.items()))

    def run_on_main(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What `function` returns when only the main rank runs it, on every rank (collective).

        An exception on the main rank is raised there as it is, and as WorldError everywhere else.
        """
        if self.world_size == 1:
            return function(*args, **kwargs)
        name = getattr(function, "__qualname__", repr(function))
        error: Optional[BaseException] = None
        result: Any = None
        if self.is_main:
            try:
                result = function(*args, **kwargs)
                pickle.dumps(result)
            except BaseException as raised:
                error = raised
        message = self.broadcast(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if message is not None:
            raise failure.caused_by(
                0,
                WorldError(
                    f"{name} failed on the main rank ({message}); rank {self.rank} would go on without its result. "
                    "See the main rank's traceback."
                ),
            )
        return self.broadcast(result)  # type: ignore[no-any-return]


class _State:
    """The one mutable thing: what `setup()` made, for `cleanup()` to take back."""

    world: Optional[World] = None
    left: Optional[World] = None  # the world that cleanup() left: its rank is still true
    group: Any = None  # the default group, where setup() made it
    store: Any = None  # of this world alone
    num_worlds: int = 0
    numbers: dict[str, int]  # the next one of each name in this world
    timeout: Optional[timedelta] = None  # of training collectives, where setup() made the group
    rng_is_split: bool = False
    on_cleanup: contextlib.ExitStack

    def __init__(self) -> None:
        self.numbers = {}
        self.on_cleanup = contextlib.ExitStack()


_state = _State()


def world() -> World:
    """The current World: the one `setup()` made, else a single process. Local; draws and starts nothing.

    After `cleanup()` it still tells the rank. Raises WorldError where a launcher started several processes
    and `setup()` was not called: each would take itself for the only one.
    """
    if _state.world is not None or _state.left is not None:
        return _state.world or _state.left  # type: ignore[return-value]
    if _has_group() or read_launch_env(os.environ).is_launched:
        raise WorldError(
            "ddpshim.world() before ddpshim.setup(), in a process that a launcher started; every rank would take "
            "itself for rank 0 of 1. Call ddpshim.setup() first."
        )
    return World(device=single_device())


def has_world() -> bool:
    """Whether `setup` was called here, and not taken back. Local."""
    return _state.world is not None


def current_or_new_world() -> World:
    """The current World; calls `setup()` where nobody has (then collective)."""
    return _state.world or setup()


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
) -> World:
    """The World of this process; joins the job that the launcher's variables (or arguments) describe.

    Collective where there is a launcher; in a plain `python train.py` it starts nothing. Reads the
    environment once and never writes to it. A group that the user has made is adopted. Calling it again
    returns the same World.

    Args:
        rank, world_size, local_rank, local_world_size, master_addr, master_port: this process's place in the job,
            instead of what a launcher's variables say; `rank` and `world_size` only together.
        backend: torch's name; default nccl where each rank has a GPU of its own, else gloo.
        device: where this rank computes; default its own GPU, else the CPU. "cuda" picks the rank's GPU.
        timeout_s: how long a rank waits for peers in the rendezvous and in a training collective.
        side_timeout_s: how long ranks wait in World's own collectives while one rank works alone.
        seed: seeds torch, numpy and random *equally* on all ranks, for building the model.
            `wrap_parallel` then gives each rank a stream of its own.
        options: what is not given here and later; default `Options.read()`, from DDPSHIM_* variables.

    Raises:
        LaunchError: partial, garbled or impossible launch variables; a port that is taken.
        OptionsError: options that are wrong, or not the same on every rank.
        WorldError: called again with arguments that contradict the first call.
    """
    place = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "local_world_size": local_world_size}
    asked: dict[str, Any] = {**place, "backend": backend, "device": device, "seed": seed, "options": options}
    if _state.world is not None:
        return _reuse(_state.world, asked)
    settle_rounding()
    options = Options.read() if options is None else options
    timeout_s = options.timeout_s if timeout_s is None else timeout_s
    side_timeout_s = options.side_timeout_s if side_timeout_s is None else side_timeout_s
    if _has_group():
        made = replace(_adopt(device, side_timeout_s), options=options)
        _check_same(made, {**asked, "backend": backend or options.backend})
    else:
        env = read_launch_env(os.environ, **place, master_addr=master_addr, master_port=master_port)
        if env.is_launched:
            made = replace(_join(env, backend or options.backend, device, timeout_s, side_timeout_s), options=options)
        else:
            made, _state.store = World(device=single_device(device), options=options), None
            if env.in_allocation:
                say(str(env.reason))
    _check_same_options(made)
    _state.numbers.clear()  # ranks may have left their last world at different ones
    _state.world, _state.left = replace(made, seed=seed, num_restarts=read_num_restarts(os.environ)), None
    if options.logs is not None:
        from ddpshim.job.rank_log import copy_output

        on_cleanup(copy_output(options.logs, made.rank))
    if seed is not None:
        seed_everything(seed)
    if made.world_size > 1:
        failure.arm(made.rank, _state.store, made.world_size)
    if made.is_launched and made.is_main:
        nodes, odd = divmod(made.world_size, made.local_world_size)
        spread = "unequal nodes" if odd else f"{count(nodes, 'node')} x {made.local_world_size}"
        decided = f"world of {made.world_size} ({made.launcher}, {spread}), {made.backend} on {made.device.type}"
        say(decided)
        if options != Options():
            say(f"options {options}")
    return _state.world


def settle_rounding() -> None:
    """Have MKL choose how it rounds tanh, sin, exp and the like, so that this process computes as the others. Local.

    On some machines the first such call of a process is now and then rounded otherwise than all that follow: on two
    virtual cores in 26 processes of 500 (`python -m tests.first_rounding`). Without MKL nothing changes.
    """
    for dtype in (torch.float32, torch.float64):
        torch.tanh(torch.zeros(16, dtype=dtype, device="cpu"))  # whatever the default device is


def cleanup() -> None:
    """Leave the job: take back what `setup()` made, and nothing that the user made.

    Local. Idempotent; safe in `finally`. While an exception is on its way out, the report of it (`ddpshim.abort`)
    stays armed, and an nccl group is left to the end of the process: its teardown would wait for peers.
    """
    made, _state.world = _state.world, None
    if made is None:
        return
    _state.left = made
    failing = failure.on_the_way_out()
    _state.on_cleanup.close()  # all are called, also after one that raises
    _state.rng_is_split = False
    if failing and made.backend == "nccl":
        return
    if not failing:
        failure.disarm()
    # In an adopted group the control group goes with the group that the user destroys.
    if _state.group is not None and _has_group() and dist.group.WORLD is _state.group:
        if not ENDS_THREADS:
            _kept.extend((_state.group, made._control))
            time.sleep(_LAST_MESSAGE_S)  # they have the lock meanwhile
        dist.destroy_process_group()
        # gloo's threads end with the last reference to their group. One that lets go of its last message while Python
        # ends wants the interpreter's lock, and aborts the process ("terminate called without an active exception").
        object.__setattr__(made, "_control", None)
    _state.group = _state.timeout = None


def split_random_streams() -> None:
    """Give every rank random streams of its own, once: noise, timesteps and dropout differ from here on.

    Local; nothing the second time, and nothing without a launcher. Derived from `setup`'s seed, else from
    the seed that torch has. Call it when all networks are built: `wrap_parallel` does.
    """
    here = world()
    if _state.rng_is_split or not here.is_launched:
        return
    base = here.seed if here.seed is not None else torch.initial_seed()
    seed_own_streams(derive_seed(base, "rank", here.rank))
    _state.rng_is_split = True


def new_group() -> Any:
    """Another process group of all ranks, with the backend and timeout of the first (collective)."""
    options: dict[str, Any] = {} if _state.timeout is None else {"timeout": _state.timeout}
    return dist.new_group(**options)


def next_number(name: str) -> int:
    """How often this was asked for `name` before in this world: the same on ranks that ask equally often. Local."""
    number = _state.numbers.get(name, 0)
    _state.numbers[name] = number + 1
    return number


def on_cleanup(callback: Callable[[], None]) -> None:
    """Have `cleanup()` call this, last registered first. Local."""
    _state.on_cleanup.callback(callback)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _reuse(made: World, asked: dict[str, Any]) -> World:
    """The World that is there already, unless the caller asks for another one."""
    seed = asked["seed"]
    if seed is None or made.seed is not None:
        _check_same(made, asked)
        return made
    if _state.rng_is_split:
        raise WorldError(
            f"setup(seed={seed}) after the ranks got random streams of their own; networks were built without that "
            "seed, and now every rank would draw the same noise. Give the seed to the first setup()."
        )
    made = replace(made, seed=seed)
    _check_same(made, asked)
    _state.world = made
    seed_everything(seed)
    return made


def _check_same(made: World, asked: dict[str, Any]) -> None:
    """Raise WorldError where arguments of `setup` contradict the world that is there."""
    for name, value in asked.items():
        there = getattr(made, name)
        if name == "device" and value is not None:
            value = torch.device(value)
            there = there if value.index is not None else torch.device(there.type)
        if None not in (value, there) and value != there:
            raise WorldError(
                f"setup({name}={str(value)!r}), but there is a world with {name}={str(there)!r} already; half of the "
                "program would rely on the one, half on the other. Call setup once, or cleanup() before."
            )


def _check_same_options(made: World) -> None:
    """Raise OptionsError, on all ranks, where they were given different options (collective)."""
    everyones = made.gather(made.options)
    for name in names():
        values = [getattr(options, name) for options in everyones]
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            raise OptionsError(
                f"option {name} is {values[0]!r} on rank 0 and {values[odd]!r} on rank {odd}; ranks would train "
                "differently, or wait for each other for ever. Give every rank the same variables and config."
            )


def _join(
    env: LaunchEnv,
    backend: Optional[str],
    device: Union[str, torch.device, None],
    timeout_s: float,
    side_timeout_s: float,
) -> World:
    """Bind the device, meet the others, agree on a backend, and make the two groups."""
    bound = bind_device(env.rank, env.local_rank, device)
    if backend == "nccl" and bound.type != "cuda":
        raise LaunchError(
            f"backend='nccl' but rank {env.rank} computes on {bound}; nccl only moves GPU memory and would fail "
            "in the first collective. Drop backend= or give the rank a GPU."
        )
    _state.num_worlds += 1
    # A second world finds the first one's keys in the store, and must not take them for its own.
    store = rendezvous.meet(env, f"ddpshim/{_state.num_worlds}", timeout_s)
    if backend is None:
        backend = agree_on_backend(store, env.rank, env.world_size, bound)
    # Its default arguments are the group that is there when it is imported (by torch's DDP, for one), for good.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    _state.group, _state.timeout, _state.store = dist.group.WORLD, timedelta(seconds=timeout_s), store
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=side_timeout_s))
    return World(
        rank=env.rank,
        local_rank=env.local_rank,
        world_size=env.world_size,
        local_world_size=env.local_world_size,
        node_rank=env.node_rank,
        device=bound,
        backend=backend,
        launcher=env.launcher,
        _control=control,
    )


def _adopt(device: Union[str, torch.device, None], side_timeout_s: float) -> World:
    """A World around the group that the user made; only the control group is ours."""
    rank, size = dist.get_rank(), dist.get_world_size()
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=side_timeout_s))
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname(), group=control)
    local = [other for other in range(size) if hosts[other] == hosts[rank]]
    first_seen = list(dict.fromkeys(hosts))
    backend = str(dist.get_backend())
    if device is None and torch.cuda.is_available() and (backend == "nccl" or torch.cuda.is_initialized()):
        device = torch.device("cuda", torch.cuda.current_device())  # the user has bound one
    _state.num_worlds += 1
    _state.store = dist.PrefixStore(f"ddpshim/{_state.num_worlds}", dist.distributed_c10d._get_default_store())
    return World(
        rank=rank,
        local_rank=local.index(rank),
        world_size=size,
        local_world_size=len(local),
        node_rank=first_seen.index(hosts[rank]),
        device=bind_device(rank, local.index(rank), device),
        backend=backend,
        launcher="adopted",
        _control=control,
    )
