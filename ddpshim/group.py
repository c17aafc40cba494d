"""The process group of this job: made once by `setup()`, handed forward as a frozen `World`.

Nothing else in ddpshim calls process-group functions for anything but gradients, and nothing
after `setup()` looks at the environment again.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Callable, NoReturn, Optional, TypeVar, Union

import torch
import torch.distributed as dist

from ddpshim.errors import LaunchError, WorldError
from ddpshim.launch import LaunchEnv, check_port, read_launch_env
from ddpshim.streams import derive_seed, seed_everything

T = TypeVar("T")

_COLLECTIVE_TIMEOUT_S = 1800.0
_SIDE_TIMEOUT_S = 86400.0
_EXIT_HANDLERS_DEADLINE_S = 5.0


@dataclass(frozen=True)
class World:
    """What one process knows of its job. Get it from `setup()`, later from `ddpshim.world()`.

    The collectives (`barrier`, `mean`, `sum`, `gather`, `broadcast`, `run_on_main`) must be reached by
    every rank and carry Python values over a CPU group of their own, so numbers stay exact and
    a rank may work alone for `side_timeout_s` (a rollout, a save) while its peers wait. In one process
    they return at once.
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
    _control: Any = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints, writes and decides: global rank 0."""
        return self.rank == 0

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process, also as a world of one (torchrun --nproc_per_node=1)."""
        return self.launcher != "none"

    def barrier(self) -> None:
        """Wait until every rank is here; patient enough for side work on one rank (collective)."""
        if self.world_size > 1:
            self.gather(None)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank (collective). Values are pickled."""
        if self.world_size == 1:
            return [value]
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self._control)
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
        dist.broadcast_object_list(box, src=src, group=self._control)
        return box[0]  # type: ignore[no-any-return]

    def sum(self, value: Any) -> Any:
        """The sum over ranks (collective) of a number, a tensor, or a mapping of these.

        Integers add exactly, floats with one rounding (math.fsum), tensors in float64 or int64.
        Raises WorldError where ranks hold different keys or shapes, or something that does not add.
        """
        return _reduce(self.gather(_to_cpu(value)), mean=False, like=value)

    def mean(self, value: Any) -> Any:
        """The mean over ranks (collective); see `sum`. A mean of integers is a float."""
        return _reduce(self.gather(_to_cpu(value)), mean=True, like=value)

    def run_on_main(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What `function` returns when only the main rank runs it, on every rank (collective).

        An exception on the main rank is raised there as it is, and as WorldError everywhere else.
        """
        if self.world_size == 1:
            return function(*args, **kwargs)
        name = getattr(function, "__qualname__", repr(function))
        failure: Optional[BaseException] = None
        result: Any = None
        if self.is_main:
            try:
                result = function(*args, **kwargs)
                pickle.dumps(result)
            except BaseException as error:
                failure = error
        message = self.broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if message is not None:
            raise WorldError(
                f"{name} failed on the main rank ({message}); rank {self.rank} would go on without its result. "
                "See the main rank's traceback."
            )
        return self.broadcast(result)  # type: ignore[no-any-return]


class _State:
    """The one mutable thing: what `setup()` made, for `cleanup()` to take back."""

    world: Optional[World] = None
    left: Optional[World] = None  # the world that cleanup() left: its rank is still true
    owns_group: bool = False
    store: Any = None
    previous_hook: Any = None
    rng_is_split: bool = False
    on_cleanup: list[Callable[[], None]]

    def __init__(self) -> None:
        self.on_cleanup = []


_state = _State()


def world() -> World:
    """The current World: the one `setup()` made, else a single process. Local; draws and starts nothing.

    After `cleanup()` it still tells the rank. Raises WorldError where a launcher started several processes
    and `setup()` was not called: each would take itself for the only one.
    """
    if _state.world is not None or _state.left is not None:
        return _state.world or _state.left  # type: ignore[return-value]
    if (dist.is_available() and dist.is_initialized()) or read_launch_env(os.environ).is_launched:
        raise WorldError(
            "ddpshim.world() before ddpshim.setup(), in a process that a launcher started; every rank would take "
            "itself for rank 0 of 1. Call ddpshim.setup() first."
        )
    return World(device=_single_device())


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
    timeout_s: float = _COLLECTIVE_TIMEOUT_S,
    side_timeout_s: float = _SIDE_TIMEOUT_S,
    seed: Optional[int] = None,
) -> World:
    """The World of this process; joins the job that the launcher's variables (or arguments) describe.

    Collective where there is a launcher; in a plain `python train.py` it starts nothing. Reads the
    environment once and never writes to it. A group that the user has made is adopted. Calling it again
    returns the same World.

    Args:
        backend: torch's name; default nccl where each rank has a GPU of its own, else gloo.
        device: where this rank computes; default its own GPU, else the CPU. "cuda" picks the rank's GPU.
        timeout_s: how long a rank waits for peers in the rendezvous and in a training collective.
        side_timeout_s: how long ranks wait in World's own collectives while one rank works alone.
        seed: seeds torch, numpy and random *equally* on all ranks, for building the model.
            `wrap_parallel` then gives each rank a stream of its own.

    Raises:
        LaunchError: partial, garbled or impossible launch variables; a port that is taken.
        WorldError: called again with arguments that contradict the first call.
    """
    if _state.world is not None:
        return _reuse(_state.world, rank=rank, world_size=world_size, backend=backend, seed=seed)
    if dist.is_available() and dist.is_initialized():
        made = _adopt(device, side_timeout_s, seed)
    else:
        env = read_launch_env(
            os.environ,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master_addr=master_addr,
            master_port=master_port,
        )
        if not env.is_launched:
            made = World(device=_single_device(device), seed=seed)
        else:
            made = _join(env, backend, device, timeout_s, side_timeout_s, seed)
    _state.world, _state.left = made, None
    if seed is not None:
        seed_everything(seed)
    if made.world_size > 1:
        _state.previous_hook, sys.excepthook = sys.excepthook, _excepthook
    if made.is_launched and made.is_main:
        nodes = made.world_size // made.local_world_size
        print(
            f"ddpshim: world of {made.world_size} ({made.launcher}, {nodes} node{'s' * (nodes > 1)} x "
            f"{made.local_world_size}), {made.backend} on {made.device.type}",
            file=sys.stderr,
            flush=True,
        )
    return made


def cleanup() -> None:
    """Leave the job: take back what `setup()` made, and nothing that the user made.

    Idempotent; safe in `finally`. While an exception is on its way out, the report of it (see `abort`)
    stays armed, and an nccl group is left to the end of the process, because tearing it down would wait
    for peers that may be gone.
    """
    made, _state.world = _state.world, None
    if made is None:
        return
    _state.left = made
    failing = sys.exc_info()[0] is not None
    while _state.on_cleanup:
        _state.on_cleanup.pop()()
    _state.rng_is_split = False
    if failing and made.world_size > 1:
        if made.backend == "nccl":
            return
    else:
        if _state.previous_hook is not None and sys.excepthook is _excepthook:
            sys.excepthook = _state.previous_hook
        _state.previous_hook = None
        _state.store = None
    if not dist.is_initialized():
        return
    if _state.owns_group:
        dist.destroy_process_group()
    # In an adopted group the control group goes with the group that the user destroys.
    _state.owns_group = False


def split_random_streams() -> None:
    """Give every rank random streams of its own, once: noise, timesteps and dropout differ from here on.

    Collective the first time (the main rank's torch seed is shared where `setup` got no seed), nothing
    afterwards and nothing without a launcher. Call it when all networks are built: `wrap_parallel` does.
    """
    here = world()
    if _state.rng_is_split or not here.is_launched:
        return
    base = here.seed if here.seed is not None else here.broadcast(torch.initial_seed())
    seed_everything(derive_seed(base, "rank", here.rank))
    _state.rng_is_split = True


def abort(error: BaseException, exit_code: int = 1) -> NoReturn:
    """End this rank now, and with it the job: one traceback on stderr, non-zero exit. Local.

    The first rank to fail claims the job's store and prints its traceback (also into torchrun's error
    file); a rank that fails because of it, or after it, prints one line. Exit handlers get five
    seconds, so that a logger's thread cannot keep peers waiting.
    """
    rank = (_state.world or _state.left or World()).rank
    first = _claim_failure(rank)
    stream = sys.__stderr__ or sys.stderr
    if first == rank:
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        print(f"ddpshim: rank {rank} ({socket.gethostname()}) failed:\n{lines}", file=stream, flush=True)
        if isinstance(error, Exception):
            _record_for_torchrun(error)
    else:
        line = str(error).splitlines()[0][:160] if str(error) else ""
        print(
            f"ddpshim: rank {rank} stops because rank {first} failed first ({type(error).__name__}: {line})",
            file=stream,
            flush=True,
        )
    handlers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    handlers.start()
    handlers.join(_EXIT_HANDLERS_DEADLINE_S)
    for out in (sys.stdout, sys.stderr, stream):
        try:
            out.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(exit_code)


def on_cleanup(callback: Callable[[], None]) -> None:
    """Have `cleanup()` call this, last registered first. Local."""
    _state.on_cleanup.append(callback)


def choose_backend(gpus: list[Optional[str]]) -> tuple[str, Optional[str]]:
    """The backend for ranks that compute on these GPUs (identity, or None for the CPU), and why not nccl.

    >>> choose_backend(["a:0", "a:1"])
    ('nccl', None)
    >>> choose_backend(["a:0", "a:0"])
    ('gloo', '2 ranks share 1 GPU')
    """
    on_gpu = [gpu for gpu in gpus if gpu is not None]
    if not on_gpu:
        return "gloo", None
    if len(on_gpu) < len(gpus):
        return "gloo", f"{len(gpus) - len(on_gpu)} of {len(gpus)} ranks have no GPU"
    if len(set(on_gpu)) < len(on_gpu):
        return "gloo", f"{len(on_gpu)} ranks share {len(set(on_gpu))} GPU{'s' * (len(set(on_gpu)) > 1)}"
    return "nccl", None


def _reuse(made: World, **asked: Any) -> World:
    """The World that is there already, unless the caller asks for another one."""
    if asked["seed"] is not None and made.seed is None:
        made = World(**{**made.__dict__, "seed": asked["seed"]})
        _state.world = made
        seed_everything(asked["seed"])
    for name, value in asked.items():
        if value is not None and value != getattr(made, name):
            raise WorldError(
                f"setup({name}={value!r}) after setup() had made a world with {name}={getattr(made, name)!r}; "
                "half of the program would rely on the one, half on the other. Call setup once, or cleanup() before."
            )
    return made


def _join(
    env: LaunchEnv,
    backend: Optional[str],
    device: Union[str, torch.device, None],
    timeout_s: float,
    side_timeout_s: float,
    seed: Optional[int],
) -> World:
    """Bind the device, meet the others, agree on a backend, and make the two groups."""
    bound = _bind_device(env, device)
    if backend == "nccl" and bound.type != "cuda":
        raise LaunchError(
            f"backend='nccl' but rank {env.rank} computes on {bound}; nccl only moves GPU memory and would fail "
            "in the first collective. Drop backend= or give the rank a GPU."
        )
    check_port(env)
    timeout = timedelta(seconds=timeout_s)
    store = _rendezvous(env, timeout)
    if backend is None:
        backend = _agree_on_backend(store, env, bound)
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=env.rank, world_size=env.world_size, timeout=timeout
    )
    _state.owns_group = True
    _state.store = store
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
        seed=seed,
        _control=control,
    )


def _rendezvous(env: LaunchEnv, timeout: timedelta) -> Any:
    """The store through which the ranks of this job find each other."""
    if env.master_addr is None or env.master_port is None:
        return dist.HashStore()  # a world of one that has nobody to meet
    if env.launcher == "torchrun":
        # Follows torchrun's restarts and the store that its agent serves.
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    # Not torch's "tcp://": under torchrun that makes every rank a client of a port that nobody serves.
    serves = env.rank == 0 and not env.agent_store
    return dist.TCPStore(env.master_addr, env.master_port, env.world_size, serves, timeout)


def _agree_on_backend(store: Any, env: LaunchEnv, device: torch.device) -> str:
    """Every rank tells its GPU through the store, so that all come to the same decision."""
    store.set(f"gpu/{env.rank}", pickle.dumps(_gpu_identity(device)))
    gpus = [pickle.loads(store.get(f"gpu/{rank}")) for rank in range(env.world_size)]
    backend, reason = choose_backend(gpus)
    if reason is not None and env.rank == 0:
        print(f"ddpshim: {reason}: gloo instead of nccl", file=sys.stderr, flush=True)
    return backend


def _gpu_identity(device: torch.device) -> Optional[str]:
    """A name for the physical GPU that is the same in every process that sees it."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"{socket.gethostname()}/{getattr(properties, 'uuid', f'{visible}[{device.index}]')}"


def _bind_device(env: LaunchEnv, device: Union[str, torch.device, None]) -> torch.device:
    """The rank's device, made current before anything else touches CUDA."""
    wanted = torch.device(device) if device is not None else None
    if wanted is not None and wanted.type != "cuda":
        return wanted
    if not torch.cuda.is_available():
        if wanted is not None:
            raise LaunchError(
                f"device={str(wanted)!r} but torch sees no GPU on rank {env.rank}; the first tensor would fail. "
                "Drop device= to compute on the CPU, or check the driver and CUDA_VISIBLE_DEVICES."
            )
        return torch.device("cpu")
    index = wanted.index if wanted is not None and wanted.index is not None else None
    if index is None:
        index = env.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _single_device(device: Union[str, torch.device, None] = None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _adopt(device: Union[str, torch.device, None], side_timeout_s: float, seed: Optional[int]) -> World:
    """A World around the group that the user made; only the control group is ours."""
    rank, size = dist.get_rank(), dist.get_world_size()
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=side_timeout_s))
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname(), group=control)
    local = [other for other in range(size) if hosts[other] == hosts[rank]]
    first_seen = list(dict.fromkeys(hosts))
    backend = str(dist.get_backend())
    if device is None and "nccl" in backend:
        device = torch.device("cuda", torch.cuda.current_device())
    return World(
        rank=rank,
        local_rank=local.index(rank),
        world_size=size,
        local_world_size=len(local),
        node_rank=first_seen.index(hosts[rank]),
        device=torch.device(device) if device is not None else torch.device("cpu"),
        backend=backend,
        launcher="adopted",
        seed=seed,
        _control=control,
    )


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _to_cpu(item) for key, item in value.items()}
    return value


def _reduce(values: list[Any], mean: bool, like: Any) -> Any:
    """Add or average one value of each rank, keeping the type of `like`."""
    first = values[0]
    if isinstance(first, Mapping):
        keys = set(like)
        for rank, other in enumerate(values):
            if not isinstance(other, Mapping) or set(other) != keys:
                odd = sorted(map(str, keys.symmetric_difference(other if isinstance(other, Mapping) else ())))
                raise WorldError(
                    f"ranks reduce mappings with different keys (rank {rank}: {odd}); their numbers would not belong "
                    "together. Log the same keys on every rank."
                )
        return {key: _reduce([value[key] for value in values], mean, like[key]) for key in like}
    if isinstance(first, torch.Tensor):
        if any(not isinstance(v, torch.Tensor) or v.shape != first.shape for v in values):
            raise WorldError(
                f"ranks reduce tensors of different shapes ({[tuple(getattr(v, 'shape', ())) for v in values]}); "
                "broadcasting would invent numbers. Reduce equal shapes."
            )
        exact = torch.float64 if first.is_floating_point() or mean else torch.int64
        total = torch.stack([v.to(exact) for v in values]).sum(0)
        if mean:
            total = total / len(values)
        return total.to(like.device, like.dtype if like.is_floating_point() else total.dtype)
    if all(isinstance(v, Integral) for v in values):
        added = sum(int(v) for v in values)
        return added / len(values) if mean else added
    if all(isinstance(v, Real) for v in values):
        added_float = math.fsum(float(v) for v in values)
        return added_float / len(values) if mean else added_float
    raise WorldError(
        f"cannot add values of type {sorted({type(v).__name__ for v in values})} over ranks; the result would be "
        "meaningless. Pass numbers, tensors or mappings of these, or use gather()."
    )


def _claim_failure(rank: int) -> int:
    """The rank that failed first: this one, unless another has said so in the store."""
    store = _state.store
    if store is None:
        return rank
    try:
        store.set_timeout(timedelta(seconds=2))
        return int(store.compare_set("ddpshim/first_failure", "", str(rank)))
    except (RuntimeError, ValueError):
        return rank  # the store died with its host: nobody can be asked any more


def _record_for_torchrun(error: Exception) -> None:
    """Tell torchrun's agent the traceback, so that its summary names the root cause."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)


def _excepthook(kind: type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
    abort(error.with_traceback(trace), 130 if issubclass(kind, KeyboardInterrupt) else 1)
