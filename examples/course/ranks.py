"""Runs a function on several ranks of this machine, from a script or from the cell of a notebook.

It replaces torchrun, which starts files: here a rank is a fork of this process, with everything that previous cells
have imported and defined. The ranks compute on the CPU, even if the machine has GPUs. Linux or macOS.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import re
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist

# Imported once here; otherwise DDP imports it in each rank, which takes seconds.
import torch._dynamo  # isort: skip

import ddpshim

REQUEUE = 75  # "start me again, I have saved"


class RanksFailed(Exception):
    """Some ranks did not end with exit code 0.

    Attributes:
        exit_codes: in rank order; negative for a signal.
        output: the ranks' output.
        error: the last line of the first traceback in the output.
    """

    def __init__(self, exit_codes: list[int], output: str, why: str) -> None:
        super().__init__(f"{why}: exit codes {exit_codes} of ranks 0 to {len(exit_codes) - 1}\n{output}")
        self.exit_codes, self.output = exit_codes, output
        found = re.search(r"^rank \d+ \| ([\w.]+Error: .*)$", output, re.MULTILINE)
        self.error = found[1] if found else ""


def run(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    nodes: int = 1,
    launched: bool = True,
    deadline_s: float = 60.0,
) -> list[Any]:
    """Return the results of `function(*args)` on all ranks, in rank order, and print the ranks' output rank by rank.

    The function calls `ddpshim.setup()`, as a trainer does; `ddpshim.cleanup()` is called after it.

    Args:
        nodes: emulate this many machines, with `num_ranks / nodes` ranks each.
        launched: False means `python train.py`, without a launcher's variables.
        deadline_s: kill the ranks after this many seconds.

    Raises RanksFailed if a rank fails; like torchrun, it then ends the others.
    """
    if not hasattr(os, "fork"):
        raise OSError("this machine cannot copy a process (fork); use Linux, macOS, or WSL on Windows.")
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes, store = [], [], None
        for rank in range(num_ranks):
            place = _as_torchrun_says(rank, num_ranks, num_ranks // nodes) if launched else {}
            hear, tell = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(
                target=_become_rank, args=(function, args, place, Path(folder) / str(rank), hear)
            )
            process.start()
            processes.append(process)
            pipes.append(tell)
        try:
            # This process serves the store, as torchrun's agent does, so the system can choose a free port. Only after
            # all forks: a lock that the store's thread holds (libc's resolver) would stay locked in a fork.
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            for tell in pipes:
                tell.send(str(store.port))
            why = _wait(processes, time.monotonic() + deadline_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
            del store  # ends its thread: a stored exception would keep it alive while the next ranks are forked
        logs = [(Path(folder) / f"{rank}.log").read_text() for rank in range(num_ranks)]
        output = "".join(f"rank {rank} | {line}\n" for rank, log in enumerate(logs) for line in log.splitlines())
        if why:
            raise RanksFailed([process.exitcode or 0 for process in processes], output, why)
        print(output, end="", flush=True)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def run_failing(function: Callable[..., Any], num_ranks: int, *args: Any) -> RanksFailed:
    """Call `run` for a function that must fail, and return its failure. Raises AssertionError if nothing failed."""
    try:
        run(function, num_ranks, *args)
    except RanksFailed as failed:
        return failed
    raise AssertionError(f"{function.__name__} was to fail, and all {num_ranks} ranks ended with exit code 0")


def _as_torchrun_says(rank: int, num_ranks: int, per_node: int) -> dict[str, str]:
    variables = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    return {name: str(value) for name, value in variables.items()}


def _wait(processes: list[Any], end: float) -> str:
    """Wait for the ranks; return why they failed, or an empty string."""
    why = ""
    while True:
        codes = [process.exitcode for process in processes]  # read once: a process may end between two reads
        failed = [code for code in codes if code]
        running = [process for process, code in zip(processes, codes) if code is None]
        if failed and not why:
            why = "a rank failed"
            for process in running if failed[0] != REQUEUE else ():
                process.terminate()
        if not running:
            return why
        if time.monotonic() > end:
            return why or "the deadline has passed"
        multiprocessing.connection.wait([process.sentinel for process in running], end - time.monotonic())


def _become_rank(function: Callable[..., Any], args: Any, place: dict[str, str], own: Path, hear: Connection) -> None:
    atexit._clear()  # exit functions of the parent, such as removing its temporary folder, must not run in a rank
    log = os.open(f"{own}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    port = hear.recv()
    os.environ.update({**place, "MASTER_PORT": port} if place else {})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A laptop's name and networks change; the loopback interface always works.
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    torch.set_num_threads(1)  # ranks share the cores, and a fork does not have its parent's threads
    try:
        result = function(*args)
        ddpshim.cleanup()
        torch.save(result, f"{own}.pt")
    except Exception as error:
        ddpshim.abort(error)
