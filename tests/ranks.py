"""The one launcher for tests that need several ranks: it forks them from a preloaded server, and never hangs.

`run_ranks(fn, num_ranks, *args)` calls the top-level function `fn(*args)` in `num_ranks` processes after
`ddpshim.setup`, and returns their results. There is a deadline inside (the group's timeout) and outside (the processes
are killed); the earliest failure is reported.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.context
import os
import socket
import tempfile
import warnings
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any, Callable, Optional
from unittest import mock

import torch

from tests import simulated_gpus
from tests.preloaded_commands import SOCKET, commands, patience

# pytest, and modules of the library that tests and programs import: 0.2 s of CPU in each process without a preload. Not
# modules that run with `python -m`, such as ddpshim.launch.rank, nor ddpshim.auto, whose import has effects.
OURS = (
    *("pytest", "torch.utils.serialization", "ddpshim.launch.runner", "ddpshim.model.parallel"),
    *("ddpshim.shares.sharded", "ddpshim.checkpoint.resume", "ddpshim.observe.recording"),
    *("ddpshim.evaluation.evaluating", "ddpshim.trainers.unedited.joining", "ddpshim.robomimic.calls"),
)
_MODULES = ["torch", "torch._dynamo", "torch.nn.parallel.distributed", "torch.distributed.run", "tests.ranks", *OURS]


class _Context(multiprocessing.context.ForkServerContext):
    """Processes that are forked from a server that has imported torch; the first one starts the server."""

    def Process(self, *args: Any, **kwargs: Any) -> Any:
        _start_server()
        return multiprocessing.context.ForkServerProcess(*args, **kwargs)


def _run_forked(server: Any, **variables: str) -> None:
    """Have `server` be a fork of the process at SOCKET, which has already imported torch."""
    own = spawn.get_executable()
    spawn.set_executable(str(commands() / "python"))
    with mock.patch.dict(os.environ, variables):
        server.ensure_running()
    spawn.set_executable(own)


@functools.cache
def _start_server() -> None:
    _server.set_forkserver_preload(_MODULES)
    if SOCKET in os.environ:  # of tests/conftest.py
        resource_tracker.ensure_running()
        _run_forked(forkserver)


_server = _Context()


@functools.cache
def _gpu_server() -> forkserver.ForkServer:
    """Start another server, whose torch has simulated GPUs."""
    from tests.preloaded import preloaded  # it imports this

    server = forkserver.ForkServer()
    server.set_forkserver_preload(_MODULES)
    gpus = simulated_gpus.environment(4, SIMULATED_GPUS_GENERATOR="cpu")
    _run_forked(server, **gpus, **{SOCKET: preloaded(on_gpus=True).socket})
    return server


def free_port() -> int:
    """Return a port that the system reserves while this process lives; a store with that number can serve it."""
    # Two sockets may bind one port if both set SO_REUSEADDR and none listens yet; torch's socket sets it.
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port = int(probe.getsockname()[1])
    probe.detach()  # keeps it open
    return port


def _enter(
    fn: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    deadline_s: float,
    environ: dict[str, str],
    on_gpus: bool,
    args: Any,
    asked: dict[str, Any],
) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # on a machine with fewer cores than workers
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.1's torch.load causes it itself
    # In torch 2.4 and 2.5, torch.storage causes it when it loads a gathered tensor.
    warnings.filterwarnings("ignore", "You are using `torch.load`", FutureWarning, r"torch\.storage")
    # torch 2.4.0's own reentrant checkpoint
    warnings.filterwarnings("ignore", r"`torch\.cpu\.amp\.autocast", FutureWarning, r"torch\.utils\.checkpoint")
    import torch.distributed as dist

    import ddpshim
    from ddpshim.launch import spawning

    def call() -> Any:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ.update(environ)
        if on_gpus:  # with a launcher's variables, so that `setup` selects the GPU and makes the groups
            names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
            os.environ.update(zip(names, map(str, (rank, rank, size, size))))
            ddpshim.setup(timeout_s=deadline_s, side_timeout_s=deadline_s, **asked)
        else:
            store, timeout = dist.FileStore(os.path.join(folder, "store"), size), timedelta(seconds=deadline_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
            ddpshim.setup(device="cpu", side_timeout_s=deadline_s, **asked)
        try:
            return fn(*args)
        finally:
            ddpshim.cleanup()

    spawning.report(folder, rank, call)
    if dist.is_initialized():  # `fn` may have destroyed the group, to make its own
        dist.destroy_process_group()


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60,
    environ: Optional[dict[str, str]] = None,
    on_gpus: bool = False,
    **asked: Any,
) -> list[Any]:
    """Return the results of `fn(*args)` on all ranks; raise RankError with the first failing rank's traceback.

    `environ` is added to the environment before `ddpshim.setup(**asked)`, whose seed is 0 if none is given. `on_gpus`:
    each rank has a simulated GPU, and nccl.
    """
    timeout_s = patience(timeout_s)
    from ddpshim.launch import spawning  # not at the top: tests/loaded.py counts the modules that a trainer loads

    if on_gpus:
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(environ or {})}
    with contextlib.ExitStack() as meanwhile:
        folder = meanwhile.enter_context(tempfile.TemporaryDirectory())
        if on_gpus:
            start = _gpu_server().connect_to_new_process
            meanwhile.enter_context(mock.patch.object(forkserver, "connect_to_new_process", start))

        def start(rank: int) -> Any:
            entering = (fn, rank, num_ranks, folder, timeout_s, environ or {}, on_gpus, args, {"seed": 0, **asked})
            process = _server.Process(target=_enter, args=entering, daemon=True)
            process.start()
            return process

        return spawning.collect(map(start, range(num_ranks)), num_ranks, folder, deadline_s=timeout_s)


def errors_of(cases: Iterable[Callable[[], Any]]) -> list[str]:
    """Return what each of `cases`, or the cleanup after it, raises on a rank; each is a job of its own (collective)."""
    import ddpshim

    said = []
    for case in cases:
        try:
            case()
            ddpshim.cleanup()
            said.append("")
        except ddpshim.errors.DdpShimError as error:
            said.append(f"{type(error).__name__}: {error}")
            ddpshim.cleanup()
        ddpshim.setup(seed=0, device="cpu")
    return said
