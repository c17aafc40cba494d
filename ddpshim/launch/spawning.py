"""Runs a function on several ranks that are forked from this process: from a notebook, a script or a test."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist

from ddpshim import variables
from ddpshim.errors import LaunchError, RankError
from ddpshim.failures import failure, unsynced_check
from ddpshim.failures.failure_notes import Note, first_to_fail, lost_a_peer, notes_in, put, traceback_of
from ddpshim.job import group
from ddpshim.process.job import begin_next
from ddpshim.process.job_store import stay_on_this_machine
from ddpshim.process.launch_env import read_launch_env
from ddpshim.process.say import ranks_called, say_once
from ddpshim.reading import end_of

_LOOK_EVERY_S = 0.5
_OTHERS_S = 3.0  # for ranks to report that they fail too, and to end after their result
_STOPPING_S = 30.0
# Variables that a launcher of another job may have set in this process.
_OF_LAUNCHERS = (variables.LAUNCHER, variables.RANK_LOGS, "TORCHELASTIC_RUN_ID")


def spawn(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    every_rank: bool = False,
    deadline_s: Optional[float] = None,
) -> Any:
    """Return the result of `function(*args)` on the main rank of `nproc` ranks on this machine. For notebooks. Local.

    Each rank is forked from this process: the function may be defined in a cell, or be a closure, and finds this
    process's variables and random state. It calls `ddpshim.setup()`, as a program for `python -m ddpshim run` does.
    Ctrl-C (a notebook's stop button) raises KeyboardInterrupt in all ranks; a second one kills them. The main rank's
    output is shown, and the last lines of a rank that fails. Tensors are returned on the CPU. A forked rank computes
    with one thread on the CPU.

    Args:
        function: the function that each rank calls.
        nproc: how many ranks; one GPU each, or all on the CPU.
        args: its arguments.
        every_rank: return a list with the result of each rank.
        deadline_s: end all ranks after so many seconds, and raise; None: wait for as long as they take.

    Raises:
        RankError: a rank failed. The text names the first that did, and holds its traceback.
        LaunchError: ranks cannot be forked: this process has used a GPU, or is itself in a job.
    """
    _check(nproc)
    context: Any = multiprocessing.get_context("fork")
    port = context.SimpleQueue()  # of the ranks' store, for each rank once
    with contextlib.ExitStack() as meanwhile:
        private = meanwhile.enter_context(tempfile.TemporaryDirectory(prefix="ddpshim-spawn-"))

        def enter(rank: int) -> None:
            _become_rank(rank, nproc, private, deadline_s)
            report(private, rank, lambda: _result(function, args, port.get()))
            if dist.is_initialized():  # the function made this group
                dist.destroy_process_group()

        def start() -> Iterator[BaseProcess]:
            for rank in range(nproc):
                process = context.Process(target=enter, args=(rank,))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # about other threads, which are not forked
                    process.start()
                yield process
            # After the forks, so that no rank has its thread. Not in rank 0: the others read who failed if it dies.
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            meanwhile.callback(lambda: store)  # keeps it until the ranks have ended
            for _ in range(nproc):
                port.put(store.port)

        results = collect(start(), nproc, private, deadline_s=deadline_s)
    return results if every_rank else results[0]


def collect(starting: Iterable[BaseProcess], num_ranks: int, folder: str, *, deadline_s: Optional[float]) -> list[Any]:
    """Start a process for each rank, and return what they `report` in `folder`; no process is left. Local.

    `starting` starts the process of each rank and yields it, in the order of their numbers. `folder`, an empty one, is
    also for `failure_notes`, output of ranks, and stacks of those that were too slow. All share `deadline_s`.

    Raises RankError with the traceback of the rank that failed first, or the names of those that were too slow.
    """
    processes: list[BaseProcess] = []
    results = [Path(folder, f"result.{rank}") for rank in range(num_ranks)]
    pending, failed = list(range(num_ranks)), list[int]()
    try:
        for process in starting:
            processes.append(process)
        end = float("inf") if deadline_s is None else time.monotonic() + deadline_s
        while pending and time.monotonic() < end:
            wait([processes[rank].sentinel for rank in pending], _LOOK_EVERY_S)
            ended = [rank for rank in pending if processes[rank].exitcode is not None]  # before looking for results
            done = [rank for rank in pending if results[rank].exists()]
            pending = [rank for rank in pending if rank not in (*ended, *done)]
            if lost := [rank for rank in ended if rank not in done]:
                failed += lost
                end = min(end, time.monotonic() + _OTHERS_S)
        if pending and not failed:
            time.sleep(_OTHERS_S)  # each rank writes its stack at its own deadline, which began a little later
    except KeyboardInterrupt:
        _interrupt(processes)
        raise
    finally:
        for process in processes:
            process.join(0 if pending or failed else _OTHERS_S)
            if process.is_alive():
                process.kill()
                process.join()
    if failed:
        told = {rank: note for rank, note in notes_in(folder).items() if note.traceback}
        notes = {rank: told.get(rank) or _unreported(processes[rank]) for rank in failed}
        rank, _ = first_to_fail({}, notes)
        printed = end_of(Path(folder, f"rank_{rank}.log"))
        last_words = f"\nThe last lines that it printed:\n{printed}" if printed else ""
        raise RankError(f"rank {rank} of {num_ranks} failed first:\n{notes[rank].traceback}{last_words}")
    if pending:
        stacks = "".join(_stack(rank, folder) for rank in pending)
        late = f"{ranks_called(pending)} of {num_ranks} still ran after {deadline_s:g} s"
        raise RankError(f"{late}, and were ended. Give a longer deadline, or look where they hang.{stacks}")
    return [torch.load(result, "cpu", weights_only=False) for result in results]


def report(folder: str, rank: int, call: Callable[[], Any]) -> None:
    """In a rank: write the result of `call()` into `folder`; if it fails, the error, and end this process. Local."""
    try:
        result = call()
        try:
            partial = Path(folder, f"partial.{rank}")
            torch.save(result, partial)
            partial.rename(Path(folder, f"result.{rank}"))  # complete or absent
        except Exception as error:
            what = f"{type(result).__name__} cannot be sent to the process that waits for it: {error}"
            raise TypeError(f"{what}. Return tensors, numbers, texts, and lists and mappings of them.") from error
    except BaseException as error:
        text = traceback_of(error)
        try:
            put(folder, rank, Note(time.time(), 1, lost_a_peer(error), text))
        except OSError:  # a full disk: the screen, or the rank's log, has the error
            print(text, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)  # without exit handlers, in which a rank could wait for its peers


def _check(nproc: int) -> None:
    if type(nproc) is not int or nproc < 1:
        raise LaunchError(f"spawn(nproc={nproc!r}): no rank could be started. Give the number of ranks, 1 or more.")
    if "fork" not in multiprocessing.get_all_start_methods():
        raise LaunchError(
            f"spawn needs fork, which {sys.platform} lacks: a function of this process could not be called in another. "
            "Write it into a file, for `python -m ddpshim run --nproc N FILE`."
        )
    if torch.cuda.is_initialized():
        raise LaunchError(
            "this process has used a GPU (a tensor on one is enough), and CUDA does not work in processes that are "
            "forked from it. Restart it (the notebook's kernel), and call spawn before anything is sent to a GPU: move "
            "that into the function."
        )
    if (dist.is_available() and dist.is_initialized()) or read_launch_env(os.environ).is_launched:
        raise LaunchError(
            "spawn in a process that is in a distributed job itself; its ranks would meet those of that job. Call it "
            "from a process that no launcher started, outside of any process group."
        )


def _become_rank(rank: int, nproc: int, private: str, deadline_s: Optional[float]) -> None:
    """Make this process, which was just forked, a rank of `spawn`."""
    os.setsid()  # Ctrl-C reaches the ranks once, through their parent
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    failure.end_with_parent()
    if rank > 0:  # sys.stdout too: a notebook's streams are not file descriptors
        stream = open(os.path.join(private, f"rank_{rank}.log"), "a", buffering=1)  # noqa: SIM115 - as below
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = stream  # type: ignore[misc]
    if deadline_s is not None:
        stack = open(os.path.join(private, f"stack.{rank}"), "w")  # noqa: SIM115 - for as long as the process lives
        faulthandler.dump_traceback_later(deadline_s, file=stack)
    begin_next()  # the parent may have called `setup` for itself
    unsynced_check.watch()
    # OpenMP's threads are not forked, and this process would wait for them forever.
    torch.set_num_threads(1)
    torch.set_num_threads = _leave_one_thread  # type: ignore[assignment]
    stay_on_this_machine()
    for name in _OF_LAUNCHERS:
        os.environ.pop(name, None)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "GROUP_RANK": 0}
    numbers["TORCHELASTIC_RESTART_COUNT"] = 0  # torch 2.1 requires it with the agent's store
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", variables.RUN_DIR: private})


def _result(function: Callable[..., Any], args: tuple[Any, ...], port: int) -> Any:
    """Return `function(*args)`, called when the ranks' store listens; None if it exits with code 0."""
    os.environ["MASTER_PORT"] = str(port)
    try:
        return function(*args)
    except SystemExit as error:
        if error.code:
            raise
        return None
    finally:
        group.cleanup()
        faulthandler.cancel_dump_traceback_later()


def _leave_one_thread(num_threads: int) -> None:
    if num_threads > 1:
        say_once(
            f"torch.set_num_threads({num_threads}) is ignored: this rank was forked, and would wait forever for the "
            "threads of the process that it was forked from. `python -m ddpshim run` has no such limit"
        )


def _unreported(process: BaseProcess) -> Note:
    code = process.exitcode or 0
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return Note(time.time(), 1, False, f"the process ended without an error message ({how})")


def _interrupt(processes: list[BaseProcess]) -> None:
    """Raise KeyboardInterrupt in all ranks, and wait for them to end; a second one in this process ends the wait."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGINT)
    end = time.monotonic() + _STOPPING_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))


def _stack(rank: int, folder: str) -> str:
    """Return where `rank` was at its deadline, innermost line first."""
    file = Path(folder, f"stack.{rank}")
    text = file.read_text() if file.exists() else ""
    main = text.rpartition("hread ")[2].partition("\n")[2].partition(f'  File "{__file__}')[0].rstrip()
    return f"\nrank {rank}, innermost call first:\n{main}" if main else ""
