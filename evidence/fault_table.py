"""Injects faults into the real patched trainer, and checks each job until its last process ends.

Run it: python -m evidence.fault_table [--write evidence/faults.md] [--only NAME,...]

Two ranks train bc on the CPU under `python -m ddpshim run`, unless a fault needs another way. A row is right if the job
ended in time with the expected exit code, named the rank that failed first, printed its error once, and left neither
processes, nor partial files, nor shared memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from ddpshim.checkpoint import find_damage
from ddpshim.process.launch_env import EXIT_REQUEUE
from evidence import pages
from evidence.equivalence import VALIDATION, copy_release, make_config, make_data
from tests.preloaded import Forked, environment, kill_all_in, preloaded, working_in
from tests.ranks import free_port

RELEASE, VARIANT = "0.3.0", "bc"
JOB_DEADLINE_S = 150.0
NAMED = re.compile(
    r"ddpshim: rank (\d+) (?:(?:\([^)]*\) )?(?:failed|was interrupted):|failed first)|because rank (\d+) failed first"
)
UNWRITABLE = "/sys/ddpshim"  # where even root can make no directory

ROLLOUTS = {
    "experiment__rollout__enabled": True,
    "experiment__rollout__n": 4,
    "experiment__rollout__horizon": 5,
    "experiment__rollout__rate": 1,
    "experiment__render_video": False,
}
SHORT = {"DDPSHIM_TIMEOUT_S": "10"}


@dataclass(frozen=True)
class Fault:
    """A fault, and its expected outcome."""

    name: str
    what: str
    where: str
    happens: str
    fault: str  # for tests.faults
    rank: Optional[int] = None  # the rank that must be named first; None: no rank failed, or all failed alike
    exit_code: int = 1
    limit_s: float = 15.0
    says: str = ""  # a pattern that the output must contain
    once: str = ""  # a pattern that the output must contain exactly once
    way: str = "run"
    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    steps: int = 10
    checkpoints: Optional[int] = None  # the number on disk afterwards


@dataclass
class Outcome:
    """The outcome of a fault."""

    exit_code: Optional[int]  # None: the job had to be killed
    seconds: float  # from the fault to the end of the last process
    named: Optional[int]
    screen: str
    logs: str  # of the ranks
    left: list[str]  # files and shared memory that should not exist
    checkpoints: list[str]
    folder: Path


def _exception(place: str, rank: int, where: str, **more: Any) -> Fault:
    settings = {"happens": "the job ends with the exception's traceback", "fault": "raise@{place}:{rank}:{call}"}
    settings |= {"name": "exception-{place}-{rank}", "once": r"^\S*ValueError: {place} on purpose", **more}
    call = settings.pop("call", 1)
    for key in ("name", "fault", "once"):
        settings[key] = settings[key].format(place=place, rank=rank, call=call)
    settings["name"] = settings["name"].replace(" ", "-")
    return Fault(what="exception", where=f"{where}, rank {rank}", rank=rank, **settings)


SAMPLE = r"^ValueError: sample \d+ is broken"
ONE_WORKER = {"train__num_data_workers": 1}
EXCEPTIONS: list[tuple[str, str, Sequence[int], dict[str, Any]]] = [  # place, where, ranks, what is special
    ("before setup", "before setup", (0, 1), {}),
    ("setup", "setup (the networks are built)", (0, 1), {}),
    ("model", "model, first step", (0, 1), {}),
    ("model", "model, 15th step", (1,), {"call": 15, "name": "exception-model-1-later", "checkpoints": 1}),
    ("dataset", "dataset, 3rd batch", (0, 1), {"call": 110, "once": SAMPLE}),
    (
        "worker",
        "dataset in a worker process",
        (0, 1),
        {"fault": "raise@dataset:{rank}:60", "settings": ONE_WORKER, "once": SAMPLE},
    ),
    (
        "rollout",
        "rollout, 2nd episode",
        (0, 1),
        {
            "fault": "toy_env:{rank}:2",
            "settings": ROLLOUTS,
            "once": "^ValueError: the toy broke on purpose",
            "happens": "the others finish their episode, then the job ends with the exception's traceback",
        },
    ),
    ("validation", "validation", (0, 1), {"settings": VALIDATION}),
    (
        "bare assert",
        "model, 5th step",
        (1,),
        {
            "fault": "assert@model:1:5",
            "once": "^AssertionError$",
            "says": r"rank 0 stops because rank 1 failed first .*AssertionError in \S*faults.py, line \d+, in _act:",
            "happens": "the same; the other rank also names file and line",
        },
    ),
    ("logger", "logger", (0,), {}),
    ("save", "save", (0,), {"checkpoints": 0}),
    ("teardown", "teardown", (0, 1), {"checkpoints": 2}),
]
FAULTS = [
    *(_exception(place, rank, where, **more) for place, where, ranks, more in EXCEPTIONS for rank in ranks),
    *(
        Fault(
            f"exit-{rank}",
            "`sys.exit(3)`",
            f"model, 5th step, rank {rank}",
            "the job ends with that exit code",
            f"exit@model:{rank}:5",
            rank,
            3,
            25,  # Python leaves in its own time
        )
        for rank in (0, 1)
    ),
    *(
        Fault(
            f"interrupt-{rank}",
            "KeyboardInterrupt",
            f"model, 5th step, rank {rank}",
            "the job ends as after Ctrl-C, with the traceback",
            f"interrupt@model:{rank}:5",
            rank,
            130,
            once="^KeyboardInterrupt",
        )
        for rank in (0, 1)
    ),
    *(
        Fault(
            name.lower(),
            name,
            "to rank 0, which waits in a collective for rank 1",
            "at the next common check the ranks save and exit, to be started again",
            f"{name}@model:1:105",
            None,
            EXIT_REQUEUE,
            says=f"{name} on rank 0: epoch .* is saved in .*; stopping with exit code {EXIT_REQUEUE}",
            steps=1000,
        )
        for name in ("SIGTERM", "SIGUSR1")
    ),
    *(
        Fault(
            f"kill-{rank}",
            "SIGKILL",
            f"model, 5th step, rank {rank}",
            "the launcher names the rank and the signal, and ends the others",
            f"kill@model:{rank}:5",
            rank,
            137,
            25,
            says=f"rank {rank} failed first: it was ended by SIGKILL",
        )
        for rank in (0, 1)
    ),
    Fault(
        "kill-with-worker",
        "SIGKILL",
        "model, 5th step, rank 1, with data workers",
        "the same; its data workers end with it",
        "kill@model:1:5",
        1,
        137,
        25,
        settings=ONE_WORKER,
    ),
    Fault(
        "missing-1",
        "a rank never starts",
        "rank 1 of 2, started by hand",
        "the others wait for DDPSHIM_TIMEOUT_S (here 10 s), then name the missing rank",
        "none:1:0",
        way="missing 1",
        environ=SHORT,
        limit_s=60,
        says=r"LaunchError: 1 of 2 ranks joined within 10 s; rank 1 is missing",
    ),
    Fault(
        "missing-0",
        "a rank never starts",
        "rank 0 of 2, started by hand",
        "the same; the error says that nothing listens at the address",
        "none:1:0",
        way="missing 0",
        environ=SHORT,
        limit_s=60,
        says=r"LaunchError: nobody answers at MASTER_ADDR='127.0.0.1', MASTER_PORT=",
    ),
    Fault(
        "unknown-host",
        "a rank does not know the host",
        "MASTER_ADDR, rank 1 of 2, started by hand",
        "an error at once; torch alone would retry for half an hour",
        "none:1:0",
        way="unknown host",
        limit_s=40,
        says=r"LaunchError: MASTER_ADDR='no-such-host.invalid' does not resolve on this machine",
        checkpoints=0,
    ),
    Fault(
        "disk-full",
        "disk full",
        "save, rank 0 (writes beyond 1 MiB of a file fail)",
        "the job ends with the error; the partial file is removed, earlier files remain",
        "full@save:0:2",
        0,
        once=r"^ddpshim.errors.CheckpointError: .* could not be written",
        settings={"algo__actor_layer_dims": [1024, 1024]},
        checkpoints=1,
    ),
    Fault(
        "read-only",
        "read-only output directory",
        "rank 0",
        "the job ends in setup with the error",
        "none:0:0",
        0,
        once=r"^(PermissionError|OSError): .*Errno",
        settings={"train__output_dir": UNWRITABLE},
        limit_s=60,
        checkpoints=0,
    ),
    Fault(
        "port-busy",
        "port busy",
        "node 0 of 2",
        "refused before anything starts",
        "none:0:0",
        way="busy port of run",
        exit_code=2,
        limit_s=60,
        once="LaunchError|cannot be served",
        says="cannot be served",
        checkpoints=0,
    ),
    Fault(
        "world-size",
        "wrong world size on one node",
        "rank 1 says 3, rank 0 says 2; started by hand",
        "every rank names both",
        "none:0:0",
        way="world sizes",
        says="LaunchError: .*WORLD_SIZE=3.*WORLD_SIZE=2|LaunchError: .*WORLD_SIZE=2.*WORLD_SIZE=3",
        environ=SHORT,
        limit_s=60,
        checkpoints=0,
    ),
    Fault(
        "other-config",
        "different config",
        "rank 1",
        "every rank names the key and both values",
        "config@before setup:1:1",
        says="WorldError: .*train.batch_size is 100 on rank 0 and 50 on rank 1",
        checkpoints=0,
    ),
    Fault(
        "other-code",
        "different code",
        "rank 1",
        "every rank names the file",
        "code:1:0",
        says=r"WorldError: .*robomimic/algo/bc\.py",
        limit_s=60,
        checkpoints=0,
    ),
    Fault(
        "existing",
        "stdin closed, the experiment exists",
        "setup",
        "the job ends with upstream's question and the possible answers; the experiment remains",
        "none:0:0",
        0,
        way="twice",
        once=r"^ddpshim.errors.LaunchError: an experiment of this name exists.*, or remove that directory",
        limit_s=60,
        checkpoints=2,
    ),
    Fault(
        "requeued",
        "a finished run is started again",
        "by a scheduler (SLURM's requeue)",
        "it does not train, prints one line, and exits with 0",
        "none:0:0",
        exit_code=0,
        way="twice",
        says=r"the training is already finished \(see .*/resume.finished\); stopping with exit code 0",
        environ={"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7"},
        limit_s=60,
        checkpoints=2,
    ),
    Fault(
        "clock",
        "clock of rank 1 is 3 h ahead",
        "throughout",
        "nothing: the main rank's clock decides",
        "clock:1:0",
        exit_code=0,
        says="finished run successfully",
        settings={"experiment__save__every_n_seconds": 3600},
        limit_s=60,
        checkpoints=2,
    ),
    Fault(
        "several-jobs",
        "two jobs on one machine",
        "at the same time",
        "nothing: both train",
        "none:0:0",
        exit_code=0,
        way="two jobs",
        says="finished run successfully",
        limit_s=90,
        checkpoints=4,
    ),
]


class _Job:
    """Processes in one folder: new interpreters, or forks of a process that has imported everything."""

    def __init__(self, fault: Fault, tree: Path, folder: Path, forked: bool) -> None:
        self.folder, self._preloaded = folder, preloaded(tree) if forked else None
        self._forked: Optional[Forked] = None
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "tmp").mkdir(exist_ok=True)
        self.environ = {
            **environment(tree),
            **fault.environ,
            "DDPSHIM_FAULT": fault.fault,
            "FAULT_OTHER_TREE": str(tree.parent / "other"),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"),
        }

    def start(self, *commands: Sequence[str], environs: Sequence[Mapping[str, Any]] = ({},)) -> None:
        """Start a process for each command, a module or a file with arguments; output goes to the job's output.txt."""
        variables = [{**self.environ, **{name: str(value) for name, value in more.items()}} for more in environs]
        if self._preloaded is not None:
            self._forked = self._preloaded.start(list(zip(commands, variables)), self.folder)
            return
        for command, environ in zip(commands, variables):
            with (self.folder / "output.txt").open("ab") as screen:
                process = subprocess.Popen(
                    [sys.executable, "-m", *command],
                    env=environ,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=screen,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._processes.append(process)

    def start_ranks(self, places: Sequence[tuple[int, int]], port: int, host: str = "127.0.0.1") -> None:
        """Start a process for each (rank, world size), without a launcher."""
        address = {"MASTER_ADDR": host, "MASTER_PORT": port}
        environs = [
            {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, **address}
            for rank, size in places
        ]
        self.start(*[_trainer(self.folder)] * len(places), environs=environs)

    def wait(self, deadline_s: float) -> Optional[int]:
        """Wait for all processes; return the first exit code that is not 0, or None if they had to be killed."""
        end = time.monotonic() + deadline_s
        while self._runs():
            if time.monotonic() > end:
                self.kill()
                return None
            time.sleep(0.05)
        codes = [process.returncode for process in self._processes]
        codes += [code for _, code in sorted(self._forked.codes.items())] if self._forked is not None else []
        return next((code for code in codes if code), 0)

    def _runs(self) -> bool:
        if self._forked is not None:
            self._forked.see(0, ends_others=False)
        own = any(process.poll() is None for process in self._processes)
        return own or (self._forked is not None and bool(self._forked.pids)) or bool(working_in(self.folder))

    def kill(self) -> None:
        """Kill all processes of the job."""
        kill_all_in(self.folder)
        for process in self._processes:
            process.wait()
        if self._forked is not None:
            self._forked.kill()


def _trainer(folder: Path) -> list[str]:
    return ["tests.faults", "--config", str(folder / "config.json")]


def _run(folder: Path, *options: str) -> list[str]:
    return ["ddpshim", "run", "--nproc", "2", *options, "-m", *_trainer(folder)]


@contextlib.contextmanager
def _taken_port() -> Iterator[int]:
    """Yield a port at which another program listens."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield other.getsockname()[1]


def prepare(work: Path) -> tuple[Path, Path]:
    """Make the patched trainer and the data of all jobs in `work`, and beside them a tree with different code."""
    tree, data, other = copy_release(RELEASE, work), make_data(work, num_demos=20), work / "other"
    if not other.exists():
        shutil.copytree(tree, other)
        with (other / "robomimic" / "algo" / "bc.py").open("a") as file:
            file.write("# another line\n")
    return tree, data


def inject(fault: Fault, folder: Path, work: Path, forked: bool = False) -> Outcome:
    """Inject a fault, and return its outcome. `folder` is the job's; `work` has the files that jobs share.

    `forked`: as in tests/preloaded.py, which takes a third of the time. Not for faults in imported code.
    """
    tree, data = prepare(work)
    folder.mkdir(parents=True)
    settings = {"experiment__save__every_n_epochs": 1, **fault.settings}
    make_config(tree, VARIANT, data, folder, fault.steps, 2, **settings).rename(folder / "config.json")
    shared = set(os.listdir("/dev/shm"))
    with contextlib.ExitStack() as stack:
        job = _Job(fault, tree, folder, forked)
        if fault.way == "twice":
            job.start(_run(folder))
            job.wait(JOB_DEADLINE_S)
            job = _Job(fault, tree, folder, forked)
        stack.callback(job.kill)
        began = time.time()
        if fault.way in ("run", "twice"):
            job.start(_run(folder))
        elif fault.way.startswith("missing"):
            job.start_ranks([(1 - int(fault.way[-1]), 2)], free_port())
        elif fault.way == "unknown host":
            job.start_ranks([(1, 2)], free_port(), "no-such-host.invalid")
        elif fault.way == "world sizes":
            job.start_ranks([(0, 2), (1, 3)], free_port())
        elif fault.way == "busy port of run":
            port = stack.enter_context(_taken_port())
            where = f"--nnodes=2 --node-rank=0 --master-addr=127.0.0.1 --master-port={port}".split()
            job.start(_run(folder, *where))
        else:
            config = json.loads((folder / "config.json").read_text())
            config["train"]["output_dir"] = str(folder / "out2")
            (folder / "config2.json").write_text(json.dumps(config))
            job.start(_run(folder), [*_run(folder)[:-1], str(folder / "config2.json")], environs=[{}, {}])
        code = job.wait(JOB_DEADLINE_S)
        ended = time.time()
    moment = folder / "fault_moment"
    screen = (folder / "output.txt").read_text(errors="replace")
    logs = "".join(p.read_text(errors="replace") for p in sorted(folder.glob("ddpshim-logs/*/rank_*.log")))
    named = NAMED.search(screen)
    checkpoints = sorted(folder.glob("out*/**/*.pth"))
    left = [f"damaged {p.name}: {find_damage(p)}" for p in checkpoints if find_damage(p) is not None]
    left += [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and _is_part_of_a_file(p, folder)]
    left += [f"/dev/shm/{name}" for name in _lasting(set(os.listdir("/dev/shm")) - shared)]
    return Outcome(
        code,
        ended - (float(moment.read_text()) if moment.exists() else began),
        None if named is None else int(named[1] or named[2]),
        screen,
        logs,
        left,
        [p.name for p in checkpoints],
        folder,
    )


def _is_part_of_a_file(path: Path, folder: Path) -> bool:
    return path.suffix in (".partial", ".damaged", ".tmp") or folder / "tmp" in path.parents


def _lasting(names: set[str], patience_s: float = 3.0) -> set[str]:
    """Return the names that stay in shared memory without a process that uses them; other programs' files have one."""
    end = time.monotonic() + patience_s
    while names and time.monotonic() < end:
        time.sleep(0.1)
        names = _without_owner(names & set(os.listdir("/dev/shm")))
    return names


def _without_owner(names: set[str]) -> set[str]:
    # By inode: a semaphore is mapped before it gets its name.
    held, left = set(), set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            mapped = (line.split() for line in (process / "maps").read_text().splitlines() if "/dev/shm/" in line)
            held.update(int(words[4]) for words in mapped)
            for file in [process / "fd" / number for number in os.listdir(process / "fd")]:
                with contextlib.suppress(FileNotFoundError):  # the file was closed meanwhile
                    if os.readlink(file).startswith("/dev/shm/"):
                        held.add(file.stat().st_ino)
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if Path("/dev/shm", name).stat().st_ino not in held:
                left.add(name)
    return left


def complaints(fault: Fault, outcome: Outcome) -> list[str]:
    """Return how the outcome differs from the expected one."""
    said = []
    if outcome.exit_code != fault.exit_code:
        said.append(f"exit code {outcome.exit_code}, not {fault.exit_code}")
    if outcome.seconds > fault.limit_s:
        said.append(f"{outcome.seconds:.1f} s, not {fault.limit_s:g}")
    if fault.rank is not None and outcome.named != fault.rank:
        said.append(f"names rank {outcome.named}, not {fault.rank}")
    if fault.once:
        times = len(re.findall(fault.once, outcome.screen, re.MULTILINE))
        if times != 1:
            said.append(f"{fault.once!r} is printed {times} times")
    if fault.says and not re.search(fault.says, outcome.screen + outcome.logs):
        said.append(f"does not say {fault.says!r}")
    if fault.checkpoints is not None and len(outcome.checkpoints) != fault.checkpoints:
        said.append(f"{len(outcome.checkpoints)} checkpoints, not {fault.checkpoints}")
    may_finish = fault.way == "twice" or "teardown" in fault.name  # the first of two jobs; a fault after the end
    if fault.exit_code and "finished run successfully" in outcome.screen and not may_finish:
        said.append("says that it finished")
    return said + [f"leaves {name}" for name in outcome.left]


COLUMNS = ("fault", "where", "what happens", "exit code", "seconds (limit)", "named first", "left on disk")
HEAD = pages.table(COLUMNS, [], prints=False)
START = "<!-- table -->"


def row(fault: Fault, outcome: Outcome) -> str:
    """Return a line of Markdown, with any differences from the expected outcome."""
    odd = "; ".join(complaints(fault, outcome))
    cells = [
        fault.what,
        fault.where,
        fault.happens + (f" **but: {odd}**" if odd else ""),
        str(outcome.exit_code),
        f"{outcome.seconds:.1f} ({fault.limit_s:g})",
        "" if outcome.named is None else f"rank {outcome.named}",
        ", ".join(outcome.checkpoints) or "no checkpoint",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def renewed(page: str, lines: Mapping[str, str]) -> list[str]:
    """Return the table of `page` with these rows, by the fault's name; other faults keep their rows."""
    found = {tuple(line.split(" | ")[:2]): line for line in page.partition(START)[2].splitlines()}
    own = {fault.name: found.get((f"| {fault.what}", fault.where)) for fault in FAULTS}
    return [*HEAD, *(line for line in {**own, **lines}.values() if line is not None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, or their beginnings")
    parser.add_argument("--write", type=Path, help="a page; rows of faults that are not injected stay")
    parser.add_argument("--jobs", type=int, default=1, help="how many at the same time")
    parser.add_argument("--folder", type=Path, help="keep the jobs' output here")
    args = parser.parse_args()
    beginnings = tuple(args.only.split(","))
    is_as_it_should_be = True
    chosen = [fault for fault in FAULTS if fault.name.startswith(beginnings)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        lines: dict[str, str] = {}
        with ThreadPoolExecutor(args.jobs) as pool:
            injected = {pool.submit(inject, fault, folder / fault.name, folder): fault for fault in chosen}
            for done in as_completed(injected):
                fault, outcome = injected[done], done.result()
                odd = complaints(fault, outcome)
                is_as_it_should_be = is_as_it_should_be and not odd
                said = "; ".join(odd) or "as it should be"
                print(f"{fault.name:28} {outcome.exit_code!s:>4} {outcome.seconds:5.1f} s  {said}", flush=True)
                lines[fault.name] = row(fault, outcome)
                if args.write:
                    pages.fill(args.write, START, "\n".join(renewed(args.write.read_text(), lines)) + "\n")
    if not args.write:
        print("\n".join(renewed("", lines)))
    if not is_as_it_should_be:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
