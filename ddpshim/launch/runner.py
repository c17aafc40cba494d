"""Implements `python -m ddpshim run`: torchrun with checks first, a log for each rank, and the first failure last.

torchrun's agent runs in this process, and starts and watches the ranks. Exit code: 0 if every rank succeeded; the code
of the first rank to fail, or 128 + N if signal N ended it; 2 if a check failed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from ddpshim import adapters, variables
from ddpshim.errors import LaunchError, OptionsError
from ddpshim.failures.failure_notes import first_to_fail, notes_in
from ddpshim.failures.preemption import LISTENS, SIGNALS
from ddpshim.lazy import nearest
from ddpshim.observe.records import FOLDER
from ddpshim.options import Options
from ddpshim.process.job_store import check_address, stay_on_this_machine
from ddpshim.process.launch_env import EXIT_REQUEUE, LaunchEnv, read_launch_env
from ddpshim.process.say import copy_to_screen, say
from ddpshim.reading import end_of
from ddpshim.trainers.unedited.program import BEGAN, module_file

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_NUM_LINES_SEARCHED = 500  # at the end of rank 0's log, for its traceback


@dataclass(frozen=True)
class Launch:
    """What to run, and where. None: `run` chooses."""

    command: Sequence[str]  # the program and its arguments, as after `python`: a file, or "-m" and a module
    nproc: str = "auto"  # the number of ranks on this node, or a word of torchrun: gpu, cpu, auto
    nnodes: Optional[int] = None
    node_rank: Optional[int] = None
    master_addr: Optional[str] = None
    master_port: Optional[int] = None
    max_restarts: int = 0
    log_dir: Optional[str] = None
    has_logs: bool = True
    grace_s: float = 60.0
    proof: Optional[str] = None  # a folder for the ranks' records, see ddpshim.tools.watching


def run(job: Launch) -> int:
    """Run `job` until all its ranks on this node have ended, and return its exit code. Local.

    Signals to this process are passed on to the ranks, once each; after SIGTERM, SIGINT, SIGHUP or SIGQUIT the ranks
    have `grace_s` to stop. Raises LaunchError, before anything is started, if the job cannot run.
    """
    job = nodes_of_scheduler(job, os.environ)
    check(job, os.environ)
    log_dir = make_log_dir(job) if job.has_logs else None
    if os.environ.get("DDPSHIM_EXACT"):  # virtual ranks may share GPUs, which must add in a fixed order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    _check_gpus(job)
    with tempfile.TemporaryDirectory(prefix="ddpshim-run-") as run_dir:
        os.environ[variables.RUN_DIR] = run_dir
        Path(run_dir, BEGAN).touch()
        # Sets of strings must have the same order in all ranks: a script may number its classes by it.
        if os.environ.get("PYTHONHASHSEED", "random") == "random":
            os.environ["PYTHONHASHSEED"] = "0"
        os.environ[variables.CHECK] = job.proof or ""
        if job.proof is not None:
            os.environ.setdefault("DDPSHIM_CAPTURE", "force")  # within its few steps; a longer run captures too
        with contextlib.ExitStack() as screen:
            if log_dir is not None:
                os.environ[variables.RANK_LOGS] = str(log_dir)
                if job.proof is None:  # `check` shows its own lines, and the output only of a run that fails
                    say(f"each rank's output goes to {log_dir}/rank_N.log")
                    if not job.node_rank:
                        screen.enter_context(_shown_on_screen(log_dir / "rank_0.log"))
            failures, received = _run_ranks(job, run_dir)
        records = Path(run_dir, FOLDER)
        if not failures:
            if records.exists() and job.proof is None:
                say(f"build a report of this run: python -m ddpshim report {shlex.quote(records.read_text())}")
            return 0
        notes = notes_in(run_dir)
        first, code = first_to_fail(failures, notes, log_dir)
        if code == EXIT_REQUEUE:  # no failure
            again = "To resume, unless a scheduler requeues this job"
            say(f"the ranks saved their progress and stopped (exit code {code}). {again}: {_resuming_command()}")
        elif any(code in (-signum, 128 + signum, -signal.SIGKILL) for signum in received):  # requested (-9: too slow)
            where = "" if log_dir is None else f"; their logs are in {log_dir}"
            name = signal.Signals(-code if code < 0 else code - 128).name
            say(f"stopped by {name}{where}")
            how = "saved nothing now: a program that resumes by itself goes on from its own last save"
            if Path(run_dir, LISTENS).exists():
                how = "saved nothing" if name in SIGNALS else f"{name} saves nothing; SIGTERM (`kill`) saves and stops"
                how += f". To resume from the last save: {_resuming_command()}"
            say(how)
        else:
            _report(first, code, log_dir, notes[first].traceback if first in notes else "", job.proof is None)
        return 128 - code if code < 0 else code


def _run_ranks(job: Launch, run_dir: str) -> tuple[Mapping[int, Any], list[int]]:
    """Run the ranks under torch's agent; return how they failed, by rank, and the signals received."""
    from torch.distributed import run as torchrun  # takes seconds, so after the checks that do not need it
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    how = [f"--nproc-per-node={job.nproc}", f"--max-restarts={job.max_restarts}", "--monitor-interval=0.1"]
    if (job.nnodes or 1) == 1:
        stay_on_this_machine()
        # The kernel chooses a free port. The address is given because the host's own name may not resolve.
        how += ["--standalone", "--local-addr=127.0.0.1"]
    else:
        how += [f"--nnodes={job.nnodes}", f"--node-rank={job.node_rank}"]
        how += [f"--master-addr={job.master_addr}", f"--master-port={job.master_port}"]
    logging.disable(logging.ERROR)  # the agent's own reports: they would come after the traceback
    with _passed_on_by_agent(job.grace_s) as received:
        try:
            options = torchrun.parse_args([*how, f"--log-dir={run_dir}", "-m", "ddpshim.launch.rank"])
            # Not through torchrun's parser, which rejects the program's own `--nproc` or `--log` as ambiguous.
            options.training_script_args = [*job.command]
            torchrun.run(options)
        except ChildFailedError as error:
            return error.failures, received
    return {}, received


def check(job: Launch, environ: Mapping[str, str]) -> None:
    """Check that `job` can start here. Local: reads files, opens and closes a socket, imports no torch.

    Raises LaunchError, with a line for each problem.
    """
    problems = [*_problems_of_environment(environ), *problems_of_program(job.command), *_problems_of_nodes(job)]
    if problems:
        raise LaunchError("\n".join(problems))


def _problems_of_environment(environ: Mapping[str, str]) -> Iterator[str]:
    seen = ", ".join(f"{name}={environ[name]!r}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ)
    if seen:
        yield (
            f"{seen} set already, so this process is a rank of a job: each rank would start its own job. Call `run` "
            "once, outside torchrun, or unset them."
        )
    forced = environ.get("DDPSHIM_LAUNCHER") or "torchrun"
    if forced != "torchrun":
        yield (
            f"DDPSHIM_LAUNCHER={forced!r}, but `run` launches through torchrun: the ranks would read another "
            "launcher's variables, or train alone. Unset DDPSHIM_LAUNCHER."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks print them
            Options.read(environ=environ)
    except OptionsError as error:
        yield str(error)


def problems_of_program(command: Sequence[str]) -> Iterator[str]:
    """Yield the reasons why `python *command` cannot run, a line each. Local; reads files, imports nothing."""
    is_module = command[0] == "-m" and len(command) > 1
    program, *arguments = command[is_module:]
    source = module_file(program) if is_module else program
    if not is_module and re.fullmatch(r"python[\d.]*", os.path.basename(program)):
        scripts = [word for word in arguments if word.endswith(".py")]
        yield (
            f"{program} is not a script: each rank would read it as one. `run` starts Python itself: leave "
            f"{program} out, as in `python -m ddpshim run {scripts[0] if scripts else 'train.py'}`."
        )
    elif source is None:
        *packages, name = program.split(".")
        folder = Path(os.getcwd(), *packages)
        near = nearest(name, [path.stem for path in folder.glob("*.py")]) or "."
        yield (
            f"-m {program}: no such module, or a package without __main__.py (searched: {folder}, PYTHONPATH): no rank "
            f"could start it. Check the spelling, install it, or set PYTHONPATH{near}"
        )
    elif not os.path.isfile(source):
        found = "is a folder" if os.path.isdir(source) else "does not exist"
        near = nearest(source, [str(path) for path in Path(source).parent.glob("*.py")]) or "."
        yield (
            f"{source} {found} (in {os.getcwd()}): no rank could start it. Give the path of a script, or -m and "
            f"the name of a module{near}"
        )
    elif source.endswith(".py"):
        try:
            with tokenize.open(source) as file:
                compile(file.read(), source, "exec", dont_inherit=True)
        except OSError as error:
            yield f"{source} cannot be read ({error}): no rank could start it. Make it readable."
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            said = str(error) or type(error).__name__
            yield f"{source} does not compile ({said}): no rank could start it. Correct it."
    known = adapters.function(program.partition(".")[0], "problems") if is_module else None
    if known is not None:
        yield from known(program, arguments)


def _problems_of_nodes(job: Launch) -> Iterator[str]:
    nnodes, node_rank = job.nnodes or 1, job.node_rank or 0
    given = {"--node-rank": job.node_rank, "--master-addr": job.master_addr, "--master-port": job.master_port}
    if nnodes == 1:
        alone = [f"{name}={value}" for name, value in given.items() if value]
        if alone:
            yield (
                f"{' '.join(alone)} without --nnodes: this node would start its own job, without the others. Give "
                "--nnodes, the same on every node; on one node leave them out."
            )
        return
    if node_rank >= nnodes:
        yield (
            f"--node-rank={node_rank} is not below --nnodes={nnodes}: the nodes would wait for one that does not "
            f"exist. Number them from 0 to {nnodes - 1}."
        )
    if missing := [name for name in ("--node-rank", "--master-addr") if given[name] is None]:
        yield (
            f"--nnodes={nnodes} without {' and '.join(missing)}: the nodes would not find each other. Give every "
            "node the address of node 0, and its own number, from 0."
        )
    if job.master_addr is not None:
        where = job.master_addr, job.master_port
        try:
            check_address(LaunchEnv("", "torchrun", node_rank, 0, nnodes, 1, node_rank, *where))
        except LaunchError as error:
            yield str(error)


def nodes_of_scheduler(job: Launch, environ: Mapping[str, str]) -> Launch:
    """Return `job` with its node number, if srun or mpirun started one `run` on each of several nodes. Local."""
    if job.nnodes is not None or any(name in environ for name in ("RANK", "WORLD_SIZE")):
        needs_port = (job.nnodes or 1) > 1 and job.master_port is None
        return replace(job, master_port=29500) if needs_port else job  # torchrun's default; all nodes must agree
    env = read_launch_env(environ)
    if env.world_size == 1:
        return job
    if env.local_world_size > 1:
        raise LaunchError(
            f"{env.reason}: {env.local_world_size} tasks on this node, and each would start all ranks of the node. "
            "Start one `run` per node (srun --ntasks-per-node=1), or start the program itself with srun."
        )
    return replace(
        job,
        nnodes=env.world_size,
        node_rank=env.rank,
        master_addr=job.master_addr or env.master_addr,
        master_port=job.master_port or env.master_port,
    )


def make_log_dir(job: Launch) -> Path:
    """Make the folder for the ranks' output, which git ignores; return it."""
    log_dir = Path(job.log_dir or f"ddpshim-logs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    try:
        is_new = job.log_dir is None and not log_dir.parent.exists()
        log_dir.mkdir(parents=True, exist_ok=True)
        if is_new:
            (log_dir.parent / ".gitignore").write_text("*\n")  # or `git status` and `git add -A` would list the logs
        with tempfile.TemporaryFile(dir=log_dir):
            return log_dir
    except OSError as error:
        raise LaunchError(
            f"{log_dir} cannot be written ({error}): the ranks' output would be lost. Give another folder with "
            "--log-dir, or use --no-logs."
        ) from error


def _check_gpus(job: Launch) -> None:
    import torch

    num_gpus = torch.cuda.device_count()
    if job.nproc == "gpu" and num_gpus == 0:
        raise LaunchError(
            "--nproc=gpu, but torch sees no GPU: no rank could start. Check the driver and CUDA_VISIBLE_DEVICES, "
            "or train on the CPU with --nproc=N."
        )
    if not job.nproc.isdecimal() or not 0 < num_gpus < int(job.nproc):
        return
    # `check` and `exact` ask whether ranks compute the same, not how fast.
    if not (os.environ.get("DDPSHIM_EXACT") or os.environ.get("DDPSHIM_BACKEND") or job.proof is not None):
        raise LaunchError(
            f"--nproc={job.nproc}, but torch sees {num_gpus} GPU{'s' * (num_gpus > 1)}: ranks would share one, which "
            f"is slower than fewer ranks. Use --nproc={num_gpus}, or CUDA_VISIBLE_DEVICES= (empty) to train on the "
            "CPU; DDPSHIM_BACKEND=gloo shares GPUs, to try a program on several ranks (nccl shares from 2.30 on, with "
            "NCCL_MULTI_RANK_GPU_ENABLE=1)."
        )
    # Each rank takes its place in this list, modulo its length.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))


@contextlib.contextmanager
def _shown_on_screen(log: Path) -> Iterator[None]:
    """Within the block, copy what is appended to `log` to stdout."""
    ended = threading.Event()

    def follow() -> None:
        # A closed pipe (`| head`) ends the display, not the training.
        with file, contextlib.suppress(BrokenPipeError):
            is_last = False
            while not is_last:
                is_last = ended.wait(0.05)  # before reading, so that no later text is lost
                for chunk in iter(lambda: file.read(1 << 16), b""):
                    copy_to_screen(chunk)

    file = log.open("ab+")  # makes it if no rank has yet, and begins at its end
    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _resuming_command() -> str:
    """Return the command of this `run`, with the options in variables, that resumes in every case."""
    named = {*variables.OF_USERS, *(f"{variables.PREFIX}{name.upper()}" for name in Options.names())}
    given = {**{name: os.environ[name] for name in sorted(named & {*os.environ})}, "DDPSHIM_RESUME": "always"}
    assigned = [f"{name}={shlex.quote(value)}" for name, value in given.items()]
    return " ".join([*assigned, shlex.join(["python", "-m", "ddpshim", *sys.argv[1:]])])


def _error_in(traceback: str) -> str:
    """Return the error of a traceback: its type, and the first line of its message that is not empty."""
    # The last of these: torch raises a data worker's error anew, with its traceback as the message.
    before = r"\n\n(?:The above exception was|During handling of) .*\n\n|\nOriginal Traceback .*\n"
    last = re.split(before, traceback)[-1]
    named = itertools.dropwhile(lambda line: line.startswith((" ", "Traceback (")), last.splitlines())
    error, *message = [line.strip() for line in named if line.strip()] or [""]
    return f"{error} {message[0]}" if message and re.fullmatch(r"[\w.]+:", error) else error


def _report(rank: int, code: int, log_dir: Optional[Path], traceback: str, is_shown: bool) -> None:
    """Print which rank failed first, and last its traceback or the end of its log; `is_shown`: rank 0's output is."""
    said = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    said += " (out of memory? see dmesg)" * (code in (-signal.SIGKILL, 128 + signal.SIGKILL))
    error = _error_in(traceback)
    if takes_port := "Address already in use" in error and "MASTER_PORT" not in error:
        error += f". Each rank takes that port: add int(os.environ.get('{variables.RANK}', 0)) to its number"
    if log_dir is None:
        say(f"rank {rank} failed first: {error} (it {said})" if error else f"rank {rank} failed first: it {said}")
        return
    log = log_dir / f"rank_{rank}.log"
    # Rank 0 may have noted a traceback that it did not print: another rank was first, or the launcher ended it.
    end = end_of(log_dir / "rank_0.log", _NUM_LINES_SEARCHED)
    has_quit = traceback.startswith("bdb.BdbQuit")  # the debugger, and rank 0 has printed it in other words
    if traceback and is_shown and (traceback.rstrip() in end or (rank == 0 and has_quit)):
        # The same error as rank 0's; or its own, the last thing on the screen unless a data worker has spoken since.
        if rank > 0 or takes_port or not (has_quit or end.endswith(traceback.rstrip())):
            say(f"rank {rank} failed first: {error} (above, and in {log})")
    elif traceback:
        say(f"rank {rank} failed first: {error} (it {said}; its log is {log}):")
        print(traceback.rstrip(), file=sys.stderr, flush=True)
    else:
        if (rank > 0 or not is_shown) and (end := end_of(log)):
            say(f"{log} ends:\n{end}")
        say(f"rank {rank} failed first: it {said} (its log is {log})")


@contextlib.contextmanager
def _passed_on_by_agent(grace_s: float) -> Iterator[list[int]]:
    """Within the block, signals go to the ranks, and torch's agent keeps watching them until they end.

    Yields the signals received so far, a list that grows. Each is passed on once, and not to data workers, which would
    die. Ranks that take more than `grace_s` seconds to stop are killed.

    Without this, the agent ends in a traceback at SIGTERM, kills ranks after half a minute, and drops their exit codes;
    at SIGUSR1 it dies and leaves them running.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    launch: Any = SubprocessContext._start  # is called when the agent has set its own handlers
    running: list[SubprocessContext] = []  # the ranks of each start; the last are the current ones
    received: list[int] = []
    too_early: list[int] = []  # received before the ranks started
    before = {signum: signal.getsignal(signum) for signum in (getattr(signal, name) for name in _SIGNALS)}

    def send(signum: int) -> None:
        for pid in running[-1].pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def give_up(name: str) -> None:
        say(f"ranks still ran {grace_s:g} s after {name}, and were killed")
        send(signal.SIGKILL)

    def pass_on(signum: int, frame: Optional[FrameType]) -> None:
        name = signal.Signals(signum).name
        if signum in received:
            if signum == signal.SIGINT:
                send(signal.SIGKILL)
            return
        received.append(signum)
        asks_to_end = signum not in (signal.SIGUSR1, signal.SIGUSR2)  # ranks decide what these mean
        say(f"{name}, passed on to the ranks{f', which have {grace_s:g} s to stop' if asks_to_end else ''}")
        if running[-1].pids():
            send(signum)
        else:  # the ranks are still being started
            too_early.append(signum)
        if asks_to_end:
            timer = threading.Timer(grace_s, give_up, [name])
            timer.daemon = True
            timer.start()

    def start(context: SubprocessContext) -> None:
        if running:  # the agent is about to restart the ranks
            ended = running[-1].wait(0)
            failures = ended.failures if ended is not None else {}
            if received or any(failure.exitcode == EXIT_REQUEUE for failure in failures.values()):
                by_rank = {int(running[-1].envs[local]["RANK"]): failure for local, failure in failures.items()}
                raise ChildFailedError(context.name, by_rank)
            for note in Path(os.environ[variables.RUN_DIR]).glob("failed.*"):
                note.unlink()  # some rank may never write another one
        running.append(context)
        for signum, handler in before.items():
            # Under nohup, SIGHUP stays ignored: another handler would end the job at the logout.
            signal.signal(signum, signal.SIG_IGN if handler == signal.SIG_IGN else pass_on)
        launch(context)  # a signal during this would make the agent abandon the ranks that it has started
        for signum in too_early:
            send(signum)

    # Until the ranks start: torch waits for other nodes in C++, where Python's own handler of Ctrl-C cannot run.
    if before[signal.SIGINT] == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    SubprocessContext._start = start  # type: ignore[method-assign]
    try:
        yield received
    finally:
        SubprocessContext._start = launch  # type: ignore[method-assign]
        for signum, handler in before.items():
            signal.signal(signum, handler)
