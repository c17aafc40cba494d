"""Injects faults into the real patched trainer, and checks each job until its last process ends.

Run it: python -m evidence.fault_table [--write] [--only NAME,...]

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
from tests.preloaded_commands import patience
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
    """A fault, and its expected outcome. Its row of the page says in words what it is, and what happens."""

    name: str
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


def _exception(place: str, rank: int, **more: Any) -> Fault:
    settings = {"name": "exception-{place}-{rank}", "fault": "raise@{place}:{rank}:{call}"}
    settings |= {"once": r"^\S*ValueError: {place} on purpose", **more}
    call = settings.pop("call", 1)
    for key in ("name", "fault", "once"):
        settings[key] = settings[key].format(place=place, rank=rank, call=call)
    settings["name"] = settings["name"].replace(" ", "-")
    return Fault(rank=rank, **settings)


SAMPLE, TOY = r"^ValueError: sample \d+ is broken", "^ValueError: the toy broke on purpose"
ONE_WORKER = {"train__num_data_workers": 1}
ASSERTED = r"rank 0 stops because rank 1 failed first .*AssertionError in \S*faults.py, line \d+, in _act:"
WORLD_SIZES = "LaunchError: .*WORLD_SIZE=3.*WORLD_SIZE=2|LaunchError: .*WORLD_SIZE=2.*WORLD_SIZE=3"
EXISTS = r"^ddpshim.errors.LaunchError: an experiment of this name exists.*, or remove that directory"
FINISHED = r"the training is already finished \(see .*/resume.finished\); stopping with exit code 0"
FULL = r"^ddpshim.errors.CheckpointError: .* could not be written"
SAVED = rf"{{}} on rank 0: epoch .* is saved in .*; stopping with exit code {EXIT_REQUEUE}"
AGAIN = {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7"}
EXCEPTIONS: list[tuple[str, Sequence[int], dict[str, Any]]] = [  # place, ranks, what is special
    ("before setup", (0, 1), {}),
    ("setup", (0, 1), {}),
    ("model", (0, 1), {}),
    ("model", (1,), {"call": 15, "name": "exception-model-1-later", "checkpoints": 1}),
    ("dataset", (0, 1), {"call": 110, "once": SAMPLE}),
    ("worker", (0, 1), {"fault": "raise@dataset:{rank}:60", "settings": ONE_WORKER, "once": SAMPLE}),
    ("rollout", (0, 1), {"fault": "toy_env:{rank}:2", "settings": ROLLOUTS, "once": TOY}),
    ("validation", (0, 1), {"settings": VALIDATION}),
    ("bare assert", (1,), {"fault": "assert@model:1:5", "once": "^AssertionError$", "says": ASSERTED}),
    ("logger", (0,), {}),
    ("save", (0,), {"checkpoints": 0}),
    ("teardown", (0, 1), {"checkpoints": 2}),
]
FAULTS = [
    *(_exception(place, rank, **more) for place, ranks, more in EXCEPTIONS for rank in ranks),
    *(Fault(f"exit-{rank}", f"exit@model:{rank}:5", rank, 3, 25) for rank in (0, 1)),  # Python leaves in its own time
    *(Fault(f"interrupt-{rank}", f"interrupt@model:{rank}:5", rank, 130, once="^KeyboardInterrupt") for rank in (0, 1)),
    *(
        Fault(name.lower(), f"{name}@model:1:105", None, EXIT_REQUEUE, says=SAVED.format(name), steps=1000)
        for name in ("SIGTERM", "SIGUSR1")
    ),
    *(
        Fault(
            f"kill-{rank}", f"kill@model:{rank}:5", rank, 137, 25, f"rank {rank} failed first: it was ended by SIGKILL"
        )
        for rank in (0, 1)
    ),
    Fault("kill-with-worker", "kill@model:1:5", 1, 137, 25, settings=ONE_WORKER),
    Fault(
        *("missing-1", "none:1:0", None, 1, 60),
        says=r"LaunchError: 1 of 2 ranks joined within 10 s; rank 1 is missing",
        way="missing 1",
        environ=SHORT,
    ),
    Fault(
        *("missing-0", "none:1:0", None, 1, 60),
        says=r"LaunchError: nobody answers at MASTER_ADDR='127.0.0.1', MASTER_PORT=",
        way="missing 0",
        environ=SHORT,
    ),
    Fault(
        *("unknown-host", "none:1:0", None, 1, 40),
        says=r"LaunchError: MASTER_ADDR='no-such-host.invalid' does not resolve on this machine",
        way="unknown host",
        checkpoints=0,
    ),
    Fault("disk-full", "full@save:0:2", 0, once=FULL, settings={"algo__actor_layer_dims": [1024, 1024]}, checkpoints=1),
    Fault(
        *("read-only", "none:0:0", 0, 1, 60),
        once=r"^(PermissionError|OSError): .*Errno",
        settings={"train__output_dir": UNWRITABLE},
        checkpoints=0,
    ),
    Fault(
        *("port-busy", "none:0:0", None, 2, 60),
        says="cannot be served",
        once="LaunchError|cannot be served",
        way="busy port of run",
        checkpoints=0,
    ),
    Fault("world-size", "none:0:0", None, 1, 60, says=WORLD_SIZES, way="world sizes", environ=SHORT, checkpoints=0),
    Fault("other-code", "code:1:0", limit_s=60, says=r"WorldError: .*robomimic/algo/bc\.py", checkpoints=0),
    Fault("existing", "none:0:0", 0, 1, 60, once=EXISTS, way="twice", checkpoints=2),
    Fault("requeued", "none:0:0", None, 0, 60, says=FINISHED, way="twice", environ=AGAIN, checkpoints=2),
    Fault(
        *("clock", "clock:1:0", None, 0, 60),
        says="finished run successfully",
        settings={"experiment__save__every_n_seconds": 3600},
        checkpoints=2,
    ),
    Fault("several-jobs", "none:0:0", None, 0, 90, says="finished run successfully", way="two jobs", checkpoints=4),
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
            job.wait(patience(JOB_DEADLINE_S))
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
        code = job.wait(patience(JOB_DEADLINE_S))
        ended = time.time()
    moment = folder / "fault_moment"  # written by tests.faults
    if moment.exists() and moment.stat().st_size:
        began = moment.stat().st_mtime
    screen = (folder / "output.txt").read_text(errors="replace")
    logs = "".join(p.read_text(errors="replace") for p in sorted(folder.glob("ddpshim-logs/*/rank_*.log")))
    named = NAMED.search(screen)
    checkpoints = sorted(folder.glob("out*/**/*.pth"))
    left = [f"damaged {p.name}: {find_damage(p)}" for p in checkpoints if find_damage(p) is not None]
    left += [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and _is_part_of_a_file(p, folder)]
    left += [f"/dev/shm/{name}" for name in _lasting(set(os.listdir("/dev/shm")) - shared)]
    return Outcome(
        code,
        ended - began,
        None if named is None else int(named[1] or named[2]),
        screen,
        logs,
        left,
        [p.name for p in checkpoints],
    )


def _is_part_of_a_file(path: Path, folder: Path) -> bool:
    return ".partial" in path.parent.suffix or path.suffix in (".damaged", ".tmp") or folder / "tmp" in path.parents


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
    if outcome.seconds > (limit_s := patience(fault.limit_s)):
        said.append(f"{outcome.seconds:.1f} s, not {limit_s:g}")
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


COLUMNS = ("name", "fault", "where", "what happens", "exit code", "seconds (limit)", "named first", "left on disk")
PAGE, START = Path(__file__).with_name("faults.md"), "<!-- table -->"


def rows_of(page: str) -> dict[str, list[str]]:
    """Return the cells of the page's rows by the name of the fault; the first four are written by hand."""
    lines = (line.strip("| ").split(" | ") for line in page.partition(START)[2].splitlines() if line.startswith("| "))
    return {cells[0]: cells for cells in lines if cells[0] != COLUMNS[0]}


def row(fault: Fault, outcome: Outcome, words: Sequence[str]) -> list[str]:
    """Return the cells of a row, with any differences from the expected outcome."""
    odd = "; ".join(complaints(fault, outcome))
    return [
        *words[:3],
        words[3].partition(" **but: ")[0] + (f" **but: {odd}**" if odd else "").replace("|", "\\|"),
        str(outcome.exit_code),
        f"{outcome.seconds:.1f} ({fault.limit_s:g})",
        "–" if outcome.named is None else f"rank {outcome.named}",
        ", ".join(outcome.checkpoints) or "no checkpoint",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, or their beginnings")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}; rows of other faults stay")
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
        rows = rows_of(PAGE.read_text())
        with ThreadPoolExecutor(args.jobs) as pool:
            injected = {pool.submit(inject, fault, folder / fault.name, folder): fault for fault in chosen}
            for done in as_completed(injected):
                fault, outcome = injected[done], done.result()
                odd = complaints(fault, outcome)
                is_as_it_should_be = is_as_it_should_be and not odd
                said = "; ".join(odd) or "as it should be"
                print(f"{fault.name:28} {outcome.exit_code!s:>4} {outcome.seconds:5.1f} s  {said}", flush=True)
                rows[fault.name] = row(fault, outcome, rows[fault.name])
                if args.write:
                    lines = pages.table(COLUMNS, (rows[fault.name] for fault in FAULTS), prints=False)
                    pages.fill(PAGE, START, "\n" + "\n".join(lines) + "\n")
    if not args.write:
        print("\n".join(pages.table(COLUMNS, (rows[fault.name] for fault in chosen), prints=False)))
    if not is_as_it_should_be:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
