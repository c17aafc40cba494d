"""`python -m ddpshim run`: what is refused, what the screen and the logs show, signals and exit codes.

The ranks here import no torch, and `run` itself is forked from the test launcher's server, which has: a job takes a
second.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SubprocessHandler

import ddpshim.__main__ as command_line
from ddpshim import variables
from ddpshim.errors import LaunchError, WorldError
from ddpshim.failures import failure, failure_notes, preemption
from ddpshim.failures.failure_notes import first_to_fail, notes_in
from ddpshim.launch import runner
from ddpshim.launch.runner import Launch
from ddpshim.observe import records
from ddpshim.options import Options
from ddpshim.process.launch_env import EXIT_REQUEUE
from ddpshim.process.say import place, say
from ddpshim.process.users_line import OURS, warning_at_users_line
from ddpshim.trainers.unedited.joining import see_one_gpu
from tests import ranks
from tests.launch.test_launch import SLURM
from tests.preloaded import kill_all_in, working_in
from tests.preloaded_commands import patience

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60

PROGRAM = """
import atexit, os, pathlib, signal, subprocess, sys, time
what, *rest = sys.argv[1:]
rank, here = int(os.environ["RANK"]), pathlib.Path.cwd()

def fail(error):
    try:
        raise KeyError("the cause")
    except KeyError:
        raise error

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def meet(name):
    (here / f"{name}_{rank}").touch()
    wait_for(f"{name}_{1 - rank}")

def handle(signum, frame):
    print("got", signal.Signals(signum).name, flush=True)
    (here / f"got_{signal.Signals(signum).name}").touch()
    if what == "save":  # nobody leaves before all have: the agent then sends SIGTERM to those that are left
        meet("saved")
        time.sleep(0.2)  # another one would be heard now
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        meet("deaf")
        sys.exit(75)

# In one piece, for the screen that ranks share: `print` makes a piece of each of its arguments.
sys.stdout.write(f"rank {rank} of {os.environ['WORLD_SIZE']} {__name__} {sys.argv} {sys.path[0]}\\n")
if what == "exit":
    os.write(2, b"10%\\r20%\\r30%")  # a progress bar
(here / f"said_{rank}").touch()
if what == "print":
    print("to stderr", file=sys.stderr)
    subprocess.run(["echo", "from a child"], check=True)
    os.write(1, b"half a line")
elif what == "raise":  # the other rank fails because of it, and is gone earlier
    if rank != int(rest[0]):
        wait_for("failed")
        atexit.register((here / "gone").touch)
        fail(ValueError("a consequence"))
    atexit.register(wait_for, "gone")
    atexit.register((here / "failed").touch)
    fail(ValueError("broken on purpose"))
elif what == "exit":
    if rank == int(rest[0]):
        wait_for(f"said_{1 - rank}")  # the other one is ended at once, in the middle of whatever it does
        sys.exit(3)
    wait_for("never")
elif what == "restart":
    if not (here / "tried").exists() and rank == 0:
        (here / "tried").touch()
        sys.exit(4)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":  # now the other one
        (here / "again").touch() if rank == 0 else wait_for("again")
        wait_for("never") if rank == 0 else sys.exit(3)
elif what == "linger":
    try:
        (pathlib.Path(os.environ["DDPSHIM_RUN_DIR"]) / rest[1]).touch()
        (here / f"ready_{rank}").touch()  # inside: the signal comes as soon as it is there
        wait_for("never")
    finally:
        if rank == int(rest[0]):  # until the agent ends it
            wait_for("never")
else:
    for name in ("SIGTERM", "SIGUSR1") if what in ("save", "ignore") else ():
        signal.signal(getattr(signal, name), handle)
    (here / f"ready_{rank}").touch()
    wait_for("never")
"""


def _enter(argv: list[str], folder: str, ignored: Optional[signal.Signals], early: Optional[signal.Signals]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started with it ignored
    if ignored is not None:
        signal.signal(ignored, signal.SIG_IGN)
    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python -m ddpshim` does
    os.environ["PYTHONPATH"] = str(ROOT)
    if early is not None:  # comes when the first of the ranks is there, and nothing else
        popen = SubprocessHandler._popen

        def signalled(self: SubprocessHandler, args: Any, env: Any) -> Any:
            process = popen(self, args, env)
            if env["RANK"] == "0":
                os.kill(os.getpid(), early)
            return process

        SubprocessHandler._popen = signalled  # type: ignore[method-assign]
    screen = os.open("screen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    sys.argv = ["ddpshim", *argv]
    sys.exit(command_line.main(argv))


class Running:
    """One `run` in a process of its own, with `folder` as its working directory; nothing is left after the block."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        options: tuple[str, ...] = (),
        program: tuple[str, ...] = ("train.py",),
        ignored: Optional[signal.Signals] = None,
        early: Optional[signal.Signals] = None,
    ) -> None:
        (folder / "train.py").write_text(PROGRAM)
        self.folder = folder
        argv = ["run", "--nproc=2", *options, *program, *arguments]
        self.process = ranks._server.Process(target=_enter, args=(argv, str(folder), ignored, early))

    def __enter__(self) -> Running:
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        kill_all_in(self.folder)  # its ranks
        self.process.join()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid or 0, number)

    def wait_for(self, *names: str) -> None:
        end = time.monotonic() + patience(DEADLINE_S)
        while not all((self.folder / name).exists() for name in names):
            assert self.process.is_alive(), self.screen
            assert time.monotonic() < end, self.screen
            multiprocessing.connection.wait([self.process.sentinel], timeout=0.02)

    def exit_code(self) -> int:
        self.process.join(patience(DEADLINE_S))
        assert self.process.exitcode is not None, self.screen
        return self.process.exitcode

    @property
    def screen(self) -> str:
        return (self.folder / "screen").read_text()

    def log(self, number: int) -> str:
        (folder,) = (self.folder / "ddpshim-logs").glob("2*")
        return (folder / f"rank_{number}.log").read_text()


def test_every_rank_has_a_log_and_rank_0_the_screen(tmp_path: Path) -> None:
    with Running(tmp_path, "print", "--nproc", "--m", "x y") as job:
        assert job.exit_code() == 0
    for number in (0, 1):
        said = f"rank {number} of 2 __main__ ['train.py', 'print', '--nproc', '--m', 'x y'] {tmp_path}\n"
        assert job.log(number) == f"{said}to stderr\nfrom a child\nhalf a line"
    first, rest = job.screen.split("\n", 1)
    assert re.fullmatch(rf"ddpshim: each rank's output goes to {tmp_path}/ddpshim-logs/\S+/rank_N.log", first)
    assert rest == job.log(0)
    assert (tmp_path / "ddpshim-logs" / ".gitignore").read_text() == "*\n"
    module = tmp_path / "inside" / "package" / "module.py"
    module.parent.mkdir(parents=True)
    module.write_text("import sys\nprint(__name__, __spec__.name, sys.argv, sys.path[0])\n")
    with Running(tmp_path / "inside", "package.module", "-m", "--config", "x", program=("-m",)) as job:
        assert job.exit_code() == 0
    arguments = [str(module), "-m", "--config", "x"]
    assert job.log(1) == f"__main__ package.module {arguments} {tmp_path / 'inside'}\n"


def test_the_end_of_a_run_says_where_its_report_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(job: Launch, run_dir: str) -> Any:
        records.begin(tmp_path / "a run", 0)
        records.note("end", how="done")
        return {}, []

    monkeypatch.setattr(runner, "_run_ranks", train)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").touch()
    for name in (variables.RUN_DIR, variables.RANK_LOGS, "PYTHONHASHSEED", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # put back after the test
    assert runner.run(Launch(["train.py"], nproc="2", has_logs=False)) == 0
    assert capsys.readouterr().err.endswith(
        f"build a report of this run: python -m ddpshim report '{tmp_path}/a run'\n"
    )


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_failing_ranks_traceback_is_the_last_thing_on_the_screen(tmp_path: Path, number: int) -> None:
    with Running(tmp_path, "raise", str(number)) as job:
        assert job.exit_code() == 1
    shown = job.screen.split("Traceback (most recent call last):\n")
    assert len(shown) == (3 if number == 0 else 5), "the cause and the error, of rank 0 and of the first failing rank"
    assert shown[-2].endswith("During handling of the above exception, another exception occurred:\n\n")
    assert re.match(r'  File ".*/train.py", line \d+, in <module>\n    fail\(', shown[-1])
    assert shown[-1].endswith("\nValueError: broken on purpose\n")
    assert job.screen.count("broken on purpose") == 2 + (number > 0)  # the program's line, its error, ddpshim's line
    assert "runpy" not in job.screen
    said = re.findall("rank . failed first: .*? exit code 1", job.screen)
    named = "rank 1 failed first: ValueError: broken on purpose (it ended with exit code 1"
    assert said == ([] if number == 0 else [named])


@pytest.mark.unit
def test_an_error_that_ranks_share_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\nValueError: no file\n'
    log = tmp_path / "rank_0.log"
    log.write_text(f"epoch 1\nddpshim: rank 0 failed:\n{shared}")
    for first, said in ((0, ""), (1, f"ddpshim: rank 1 failed first: ValueError: no file (above, and in {tmp_path}")):
        runner._report(first, 1, tmp_path, shared, is_shown=True)
        printed = capsys.readouterr().err.strip()
        assert printed.startswith(said)
        assert "Traceback" not in printed
    log.write_text(f"{shared}ddpshim: a line of a data worker\n")
    runner._report(0, 1, tmp_path, shared, is_shown=True)
    assert capsys.readouterr().err.startswith("ddpshim: rank 0 failed first: ValueError: no file (above, and in")
    log.write_text("epoch 1\n")  # ended before it printed the error
    for first, noted in itertools.product(
        (0, 1), (shared, "ddpshim.errors.SyncError: rank 1 has waited:\n  rank 0: 2\n")
    ):
        runner._report(first, 1, tmp_path, noted, is_shown=True)
        assert capsys.readouterr().err.endswith(noted)
    log.write_text(shared)
    runner._report(1, 1, tmp_path, shared.replace("no file", "another"), is_shown=True)
    assert capsys.readouterr().err.endswith("ValueError: another\n")
    taken = shared.replace("ValueError: no file", "OSError: [Errno 98] Address already in use")
    for first in range(2):
        log.write_text(taken)
        runner._report(first, 1, tmp_path, taken, is_shown=True)
        assert "Each rank takes that port: add int(os.environ.get('DDPSHIM_RANK', 0))" in capsys.readouterr().err
    runner._report(1, 1, None, shared, is_shown=False)  # --no-logs: the traceback may stand above other ranks' output
    assert capsys.readouterr().err == "ddpshim: rank 1 failed first: ValueError: no file (it ended with exit code 1)\n"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("code", "how"),
    [
        (-9, "was ended by SIGKILL (out of memory? see dmesg)"),
        (137, "ended with exit code 137 (out of memory? see dmesg)"),
        (-11, "was ended by SIGSEGV"),
    ],
)
def test_who_left_no_error_is_named_last(
    code: int, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for said, before in ((f"rank {code}", f"ddpshim: {tmp_path}/rank_1.log ends:\nrank {code}\n"), ("", "")):
        (tmp_path / "rank_1.log").write_text(said)
        runner._report(1, code, tmp_path, "", is_shown=True)
        last = f"ddpshim: rank 1 failed first: it {how} (its log is {tmp_path}/rank_1.log)\n"
        assert capsys.readouterr().err == before + last


@pytest.mark.unit
def test_an_error_has_its_type_and_the_first_line_of_its_message() -> None:
    for message in ("\nundefined value x:\n  File 'a.py', line 1\n    x\n", "", "too large\n  twice"):
        try:
            raise RuntimeError(message)
        except RuntimeError:
            named = runner._error_in(traceback.format_exc())
        text = message.strip().partition("\n")[0]
        assert named == (f"RuntimeError: {text}" if text else "RuntimeError")


OURS_BETWEEN = """
import contextlib

@contextlib.contextmanager
def around():
    yield

@around()
def call(function, depth=0):
    if depth < 9:
        return call(function, depth + 1)
    try:
        {}["absent"]
    except KeyError:
        function()
"""


@pytest.mark.unit
def test_a_traceback_has_the_frames_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(compile(OURS_BETWEEN, f"{OURS}/rows/between.py", "exec"), names)

    def fail() -> None:
        file = f"{OURS}/rows/samples.py"
        worker = (
            f'  File "{file}", line 1, in fetch\n    fetched\n  File "data.py", line 7, in item\n    x\nValueError: 7'
        )
        raise ValueError(
            f"Caught in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n{worker}"
        )

    def shown() -> str:
        with pytest.raises(ValueError, match="Caught") as caught:
            names["call"](fail)
        assert place(caught.value) == "data.py, line 7, in item"
        return failure_notes.traceback_of(caught.value)

    text = shown()
    assert re.findall(r"  File .*, in (.*)", text) == ["shown", "fail", "item"]
    assert text.startswith("Traceback (most recent call last):\n  File")
    assert text.endswith('last):\n  File "data.py", line 7, in item\n    x\nValueError: 7\n')
    monkeypatch.setenv(variables.TRACEBACK, "full")
    text = shown()
    assert "KeyError: 'absent'\n\nDuring handling" in text
    assert text.count(f'  File "{OURS}/rows/') > 2


@pytest.mark.unit
def test_a_warning_has_the_line_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of torch's C++ code has, which knows only the frame that calls it: a stand-in's."""
    names: dict[str, Any] = {}
    exec(compile("import warnings\ndef read(): warnings.warn('slow')", f"{OURS}/rows/between.py", "exec"), names)
    said: list[str] = []

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        said.append(warnings.formatwarning(message, category, filename, lineno, line))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        monkeypatch.setattr(warnings, "formatwarning", warning_at_users_line(warnings.formatwarning))
        names["read"]()
    line = sys._getframe().f_lineno - 1
    assert said == [f'{__file__}:{line}: UserWarning: slow\n  names["read"]()\n']


@pytest.mark.unit
@pytest.mark.parametrize(
    ("said", "seen", "first"),
    [
        # A second has begun between the end of rank 1 and the agent's look at it.
        ({0: (9.99, 1, True)}, {1: (10, -9), 0: (10, -15)}, (1, -9)),
        ({0: (10.7, 1, False)}, {1: (10, -6), 0: (10, 1)}, (0, 1)),
        ({0: (11.1, 1, False)}, {1: (10, -9), 0: (11, 1)}, (1, -9)),
        ({0: (10.3, 1, False), 1: (10.2, 3, False)}, {0: (10, 1), 1: (12, -15)}, (1, 3)),
        ({0: (10.3, 1, False), 1: (10.2, 3, True)}, {0: (10, 1), 1: (12, -15)}, (0, 1)),
        ({}, {0: (10, -15), 1: (11, 4)}, (1, 4)),
        # Ranks printed that rank 1 was first; SIGTERM from outside, to rank 1, and then from the agent.
        ({0: (10.2, 1, False, False), 1: (10.3, 3, False)}, {0: (10, 1), 1: (10, 3)}, (1, 3)),
        ({0: (10.3, 1, True)}, {1: (10, -15), 0: (10, -15), 2: (10, -15)}, (1, -15)),
        ({0: (10.3, 1, True)}, {0: (10, 1), 1: (10, -15)}, (0, 1)),
        # nccl's watchdog has ended ranks 0 and 3, and not rank 2, in which something of its own aborts.
        ({}, {0: (10, -6), 1: (10, -9)}, (1, -9)),
        ({}, {0: (10, -6), 2: (11, -6)}, (2, -6)),
        ({}, {0: (11, -6), 3: (10, -6)}, (3, -6)),
    ],
)
def test_who_failed_first(said: Any, seen: Any, first: tuple[int, int], tmp_path: Path) -> None:
    watchdog = "[E ProcessGroupNCCL.cpp:605] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7"
    for number in (0, 3):
        (tmp_path / f"rank_{number}.log").write_text(watchdog.format(number))
    own = {number: failure_notes.Note(*what[:3], "", *what[3:]) for number, what in said.items()}
    ends = {number: SimpleNamespace(timestamp=moment, exitcode=code) for number, (moment, code) in seen.items()}
    assert first_to_fail(ends, own, tmp_path) == first


@pytest.mark.unit
def test_what_a_rank_says_of_its_end_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variables.RUN_DIR, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    lost = RuntimeError("Connection reset by peer")
    with monkeypatch.context() as ended:
        ended.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            failure_notes.write(lost, 1)
    assert notes_in(str(tmp_path)) == {}
    failure_notes.write(lost, 1)
    failure_notes.write(ValueError("what came of it"), 3)
    said = "RuntimeError: Connection reset by peer\n"
    assert notes_in(str(tmp_path)) == {1: (pytest.approx(time.time(), abs=patience(60)), 1, True, said, True)}
    failure_notes.write(ValueError("rank 0 left early"), 1, knows_cause=True)
    assert notes_in(str(tmp_path))[1][2:] == (False, "ValueError: rank 0 left early\n", True)
    (tmp_path / "failed.1").unlink()
    failure_notes.write(failure.caused_by(1, WorldError("its own")), 1)
    assert not notes_in(str(tmp_path))[1].lost_a_peer
    assert not notes_in(str(tmp_path))[1].is_first, "another rank than this process's, which is 0 without a job"
    (tmp_path / "failed.1").unlink()
    failure_notes.write(failure.caused_by(0, WorldError("call failed on the main rank (EOFError)")), 1)
    time.sleep(0.01)  # so that rank 0 is later
    monkeypatch.setenv("RANK", "0")
    failure_notes.write(EOFError("closed"), 3)
    assert first_to_fail({}, notes_in(str(tmp_path))) == (0, 3), "the cause, not what it caused"
    monkeypatch.setenv(variables.RUN_DIR, str(tmp_path / "removed"))
    failure_notes.write(ValueError("boom"), 1)  # the rank must end even so
    assert "failed.0 cannot be written" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_reaches_the_ranks_once_and_their_exit_code_comes_back(tmp_path: Path, name: str) -> None:
    with Running(tmp_path, "save", options=("--max-restarts", "1"), ignored=signal.SIGHUP) as job:
        job.wait_for("ready_0", "ready_1")
        job.send(signal.SIGHUP)  # of a logout, under nohup
        job.send(signal.Signals[name])
        assert job.exit_code() == EXIT_REQUEUE == 75
    for number in (0, 1):
        assert job.log(number).count(f"got {name}") == 1
        assert job.log(number).count(f"rank {number} of 2") == 1, "not started again"
    assert f"ddpshim: {name}, passed on to the ranks" in job.screen
    assert "SIGHUP" not in job.screen
    again = "DDPSHIM_RESUME=always python -m ddpshim run --nproc=2 --max-restarts 1 train.py save\n"
    assert job.screen.endswith(f"(exit code 75). To resume, unless a scheduler requeues this job: {again}")


@pytest.mark.unit
def test_the_command_that_resumes_has_the_options_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ddpshim", "run", "train.py", "--name", "a b"])
    for name in Options.names():
        monkeypatch.delenv(f"DDPSHIM_{name.upper()}", raising=False)
    for name, value in {"DDPSHIM_RUN_ID": "9", "DDPSHIM_RESUME": "auto", "DDPSHIM_NODE_MEMORY": "our disk"}.items():
        monkeypatch.setenv(name, value)
    again = "DDPSHIM_NODE_MEMORY='our disk' DDPSHIM_RESUME=always python -m ddpshim run train.py --name 'a b'"
    assert runner._resuming_command() == again


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_that_comes_while_the_ranks_are_started(tmp_path: Path, name: str, code: int) -> None:
    with Running(tmp_path, "wait", early=signal.Signals[name]) as job:
        assert job.exit_code() == code
        assert working_in(tmp_path) == [], "a rank that nobody waits for"
    assert f"ddpshim: {name}, passed on to the ranks" in job.screen
    assert f"ddpshim: stopped by {name}" in job.screen


@pytest.mark.parametrize(("last", "listens"), [(0, False), (1, True)])
def test_ctrl_c(tmp_path: Path, last: int, listens: bool) -> None:
    arguments = "linger", str(last), preemption.LISTENS if listens else "no_Resumable"
    with Running(tmp_path, *arguments) as job:
        job.wait_for("ready_0", "ready_1")
        job.send(signal.SIGINT)
        assert job.exit_code() == 130
    assert job.screen.count("KeyboardInterrupt") == last, "rank 0's own, which the agent's SIGTERM cuts short"
    assert "failed" not in job.screen
    assert "rank.py" not in job.screen
    (log_dir,) = (tmp_path / "ddpshim-logs").glob("2*")
    stopped, how_to_resume = job.screen.splitlines()[-2:]
    assert stopped == f"ddpshim: stopped by SIGINT; their logs are in {log_dir}"
    again = f"DDPSHIM_RESUME=always python -m ddpshim run --nproc=2 train.py {' '.join(arguments)}"
    assert how_to_resume == (
        f"ddpshim: SIGINT saves nothing; SIGTERM (`kill`) saves and stops. To resume from the last save: {again}"
        if listens
        else "ddpshim: saved nothing now: a program that resumes by itself goes on from its own last save"
    )


@pytest.mark.parametrize("nproc", [1, 2])
def test_ranks_that_do_not_end_are_killed_when_their_time_is_over(tmp_path: Path, nproc: int) -> None:
    with Running(tmp_path, "ignore", options=(f"--nproc={nproc}", "--grace", "1")) as job:
        job.wait_for(*(f"ready_{number}" for number in range(nproc)))
        job.send(signal.SIGUSR1)
        job.wait_for("got_SIGUSR1")  # of two at once, the rank may be told in either order
        start = time.monotonic()
        job.send(signal.SIGTERM)
        assert job.exit_code() == 137
        assert working_in(tmp_path) == []
    assert 1 <= time.monotonic() - start < patience(20)
    assert "ddpshim: ranks still ran 1 s after SIGTERM, and were killed" in job.screen
    assert "out of memory" not in job.screen
    assert re.findall("got .*", job.log(0)) == ["got SIGUSR1", "got SIGTERM"]


def test_a_restarted_rank_goes_on_in_its_log_and_is_not_blamed_for_what_it_did_before(tmp_path: Path) -> None:
    with Running(tmp_path, "restart", options=("--max-restarts", "1")) as job:
        assert job.exit_code() == 3
    assert job.log(0).count("rank 0 of 2") == 2
    assert "rank 1 failed first: it ended with exit code 3" in job.screen


def test_without_logs_all_ranks_have_the_screen(tmp_path: Path) -> None:
    with Running(tmp_path, "exit", "1", options=("--no-logs",)) as job:
        assert job.exit_code() == 3
    assert sorted(re.findall("rank . of 2", job.screen)) == ["rank 0 of 2", "rank 1 of 2"]
    assert job.screen.endswith("ddpshim: rank 1 failed first: it ended with exit code 3\n")
    assert not (tmp_path / "ddpshim-logs").exists()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import nowhere\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    for name in ("alone", "main", "loud"):
        (tmp_path / name).mkdir()
    (tmp_path / "main" / "__main__.py").write_text("")
    (tmp_path / "loud" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "loud" / "train.py").write_text("")
    (tmp_path / "loud" / "bare").mkdir()
    (tmp_path / "loud" / "bare" / "train.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


NODES = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": 29400}


PASS = [
    Launch(["train.py"]),
    Launch(["-m", "main"]),
    Launch(["-m", "loud.train"]),  # packages above are found, not imported
    Launch(["-m", "loud.bare.train"]),
    Launch(["train.py"], nnodes=1),
    Launch(["train.py"], **NODES, node_rank=1),  # type: ignore[arg-type]
]
REFUSED = [
    (Launch(["python", "-u", "a.py"]), "python is not a script: each rank would read it as one. `run` starts Python "),
    (Launch(["/bin/python3.11", "a.py", "b"]), "/bin/python3.11 is not a script"),
    (Launch(["broken.py"]), "broken.py does not compile (invalid syntax (broken.py, line 1))"),
    (Launch(["-m", "main.absent"]), "-m main.absent: no such module"),
    (Launch(["-m", "alone"]), "-m alone: no such module, or a package without __main__.py"),
    (Launch(["-m", "train..x"]), "-m train..x: no such module"),
    (Launch(["train.py"], **NODES, node_rank=2), "--node-rank=2 is not below --nnodes=2"),  # type: ignore[arg-type]
    (Launch(["train.py"], nnodes=2), "--nnodes=2 without --node-rank and --master-addr"),
    (Launch(["train.py"], node_rank=1), "--node-rank=1 without --nnodes"),
    (
        Launch(["train.py"], nnodes=2, node_rank=1, master_addr="absent.invalid", master_port=1),
        "MASTER_ADDR='absent.invalid' does not resolve",
    ),
]


@pytest.mark.unit
@pytest.mark.parametrize(("job", "message"), [*REFUSED, *((job, "") for job in PASS)])
def test_what_is_checked_before_ranks_start(here: Path, job: Launch, message: str) -> None:
    if not message:
        runner.check(job, {"DDPSHIM_LAUNCHER": "torchrun"})
        return
    with pytest.raises(LaunchError) as caught:
        runner.check(job, {})
    assert str(caught.value).startswith(message)
    assert len(re.split(r": |\. ", str(caught.value))) >= 3


@pytest.mark.unit
def test_all_that_is_wrong_is_named_before_any_rank_starts(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "_run_ranks", lambda *_: pytest.fail("ranks were started"))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    wrong = {"WORLD_SIZE": "2", "DDPSHIM_LAUNCHER": "none", "DDPSHIM_PRECISIN": "bf16"}
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    assert command_line.main(["run", "--nnodes", "1", "--node-rank", "1", "absent.py"]) == 2
    nested, forced, options, option, nothing, absent, node = capsys.readouterr().err.splitlines()
    assert nested.startswith("ddpshim: WORLD_SIZE='2' set already, so this process is a rank of a job")
    assert forced.startswith("DDPSHIM_LAUNCHER='none', but `run` launches through torchrun")
    assert options == "1 option is wrong:"
    assert option == "  - variable DDPSHIM_PRECISIN: no such option; did you mean DDPSHIM_PRECISION?"
    assert nothing.endswith("`python -m ddpshim docs options` lists all options.")
    assert absent.startswith("absent.py does not exist")
    assert node.startswith("--node-rank=1")
    for usage in (["run"], ["run", "--nnodes", "0", "train.py"], ["run", "--log-dir", "x", "--no-logs", "train.py"]):
        with pytest.raises(SystemExit, match="2"):
            command_line.main(usage)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("nproc", "num_gpus", "wanted", "message"),
    [
        ("gpu", 0, "", "--nproc=gpu, but torch sees no GPU"),
        ("3", 2, "", "--nproc=3, but torch sees 2 GPUs"),
        *((nproc, num_gpus, "", None) for nproc, num_gpus in (("2", 2), ("3", 0), ("auto", 2))),
        *(("3", 2, on_purpose, None) for on_purpose in ("BACKEND=gloo", "BACKEND=nccl", "EXACT=4", "check")),
    ],
)
def test_ranks_and_gpus(
    monkeypatch: pytest.MonkeyPatch, nproc: str, num_gpus: int, wanted: str, message: Optional[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(*f"DDPSHIM_{wanted}".split("=") if "=" in wanted else ("UNUSED", ""))
    with pytest.raises(LaunchError, match=message) if message else contextlib.nullcontext():
        runner._check_gpus(Launch(["train.py"], nproc=nproc, proof="folder" if wanted == "check" else None))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("0,1" if wanted else None)
    if wanted:
        see_one_gpu(2)
        assert os.environ.pop("CUDA_VISIBLE_DEVICES") == "0"


STEP = {
    **SLURM,
    **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1"},
    **{"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "gpu[1-2]"},
}


@pytest.mark.unit
def test_one_run_on_each_node_of_srun_needs_no_options() -> None:
    job = runner.nodes_of_scheduler(Launch(["train.py"]), STEP)
    assert (job.nnodes, job.node_rank, job.master_addr) == (2, 1, "gpu1")
    assert 15000 <= (job.master_port or 0) < 30000
    by_hand = Launch(["train.py"], nnodes=3, node_rank=0, master_addr="a")
    assert runner.nodes_of_scheduler(by_hand, STEP).master_port == 29500
    crowded = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
    with pytest.raises(LaunchError, match="2 tasks on this node, and each would start all ranks of the node"):
        runner.nodes_of_scheduler(Launch(["train.py"]), crowded)


@pytest.mark.unit
def test_a_log_that_is_written_in_the_last_moment_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # as a pipe, it cannot be read
    for log, begin in (("saved\n", ""), ("10%\r20%", "\n"), ("\n", "")):
        with runner._shown_on_screen(tmp_path / "rank_0.log"):
            time.sleep(0.02)  # it has looked for the log, most probably, and looks again later
            (tmp_path / "rank_0.log").write_text(log)
        assert capfd.readouterr().out == log
        (tmp_path / "rank_0.log").unlink()
        say("next")
        say("last")
        assert sys.stderr.getvalue() == f"{begin}ddpshim: next\nddpshim: last\n"  # type: ignore[attr-defined]
        sys.stderr.truncate(0), sys.stderr.seek(0)
