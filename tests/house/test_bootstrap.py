"""The two commands of the README, with neither pip nor a network: what they would run, and what they leave alone."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import bootstrap
from examples import same_experiment
from tests.preloaded import preloaded
from tests.preloaded_commands import commands, patience, python

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60


class Machine:
    """bootstrap.py in a clone whose path has a space, with a venv that has no pip and a pip that installs nothing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "with space" / "clone"
        self.venv = self.root / ".venv"
        self.torch: Path | None = None
        self.modules: set[str] = set()
        self.calls: list[list[str]] = []
        self.fails_at = ""
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        for name in ("pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, self.root)
        monkeypatch.setattr(bootstrap, "ROOT", self.root)
        monkeypatch.setattr(bootstrap, "call", self._call)
        monkeypatch.setattr(bootstrap, "has", lambda _, module: module in self.modules)
        monkeypatch.setattr(bootstrap, "torch_of_the_caller", lambda _: self.torch)
        monkeypatch.setattr(bootstrap, "FIRST_TOO_NEW", (99, 0))
        self._monkeypatch = monkeypatch

    def _call(self, command: list[str], held: tuple[int, ...] = ()) -> None:
        words = command[1:]
        self.calls.append(words)
        if self.fails_at and self.fails_at in words:
            sys.exit(7)
        if words[:2] == ["-m", "venv"]:
            python = bootstrap.python_of(Path(words[2]))
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
            (Path(words[2]) / "lib").mkdir()
            (Path(words[2]) / "lib64").symlink_to("lib")
        if "no-deps" in " ".join(words):
            self.modules |= {"torch", "torchvision", "robomimic"}

    def run(self, *arguments: str) -> list[list[str]]:
        """What one start of the script calls, each without the Python in front."""
        self.calls.clear()
        self._monkeypatch.setattr(sys, "argv", ["bootstrap.py", *arguments, "--venv", str(self.venv)])
        bootstrap.main()
        return list(self.calls)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def _pip(calls: list[list[str]]) -> list[list[str]]:
    return [words[6:] for words in calls if words[:3] == ["-m", "pip", "install"]]


RESOLVED = ["-r", "requirements/robomimic.txt", "-r", "requirements/report.txt", "-r", "requirements/test.txt"]
NO_DEPS = ["torchvision==0.16.2", "robomimic==0.3.0"]


def test_what_is_installed_in_which_order_and_that_a_second_run_asks_nobody(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv, *installed, demo = machine.run("demo")
    assert (venv, demo) == (["-m", "venv", str(machine.venv)], ["examples/same_experiment.py"])
    assert _pip(installed) == [["--no-warn-conflicts", bootstrap.TORCH, *RESOLVED], ["--no-deps", *NO_DEPS, "-e", "."]]
    with monkeypatch.context() as unasked:
        unasked.setattr(bootstrap, "asked", None)
        unasked.setattr(bootstrap, "locked", None)
        assert machine.run("demo", "--steps", "20") == [["examples/same_experiment.py", "--steps", "20"]]
    assert _pip(machine.run("install")) == [["--no-warn-conflicts", *RESOLVED], ["--no-deps", "-e", "."]]
    for name in ("requirements/test.txt", "requirements/new.txt", "pyproject.toml", "setup.py", "", ""):
        if name:
            with (machine.root / name).open("a") as file:
                file.write("# changed\n")
        else:  # a torch comes, or goes
            machine.torch = None if machine.torch else machine.root
        assert [len(_pip(machine.run("demo"))) for _ in range(2)] == [2, 0]


@pytest.mark.parametrize("fails_at", ["venv", "--no-warn-conflicts", "--no-deps"])
def test_what_failed_or_was_killed_on_the_way_is_made_again(
    machine: Machine, fails_at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fails_at = fails_at
    with pytest.raises(SystemExit) as ended:
        machine.run("demo")
    assert ended.value.code == 7
    assert "same_experiment" not in str(machine.calls)
    half = machine.venv / "lib" / "half_a_package"
    half.mkdir(parents=True, exist_ok=True)
    machine.fails_at = ""
    machine.modules.clear()
    assert [words[1] for words in machine.run("demo")[:3]] == ["venv", "pip", "pip"]
    assert "making it again" in capsys.readouterr().out
    assert not half.exists()
    assert len(machine.run("demo")) == 1


def test_an_environment_whose_python_is_gone_is_made_again(machine: Machine) -> None:
    machine.run("install")
    python = bootstrap.python_of(machine.venv)
    python.unlink()
    python.symlink_to("/no/such/python")
    assert ["-m", "venv", str(machine.venv)] in machine.run("demo")
    bootstrap.empty(machine.venv)
    assert [path.name for path in machine.venv.iterdir()] == [bootstrap.MADE], "who made it stays known"


def test_somebody_elses_environment_is_filled_and_never_emptied(machine: Machine) -> None:
    python = bootstrap.python_of(machine.venv)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    theirs = machine.venv / "theirs"
    theirs.touch()
    machine.fails_at = "--no-deps"
    for _ in range(2):
        with pytest.raises(SystemExit):
            machine.run("demo")
    machine.fails_at = ""
    # Here pip may report conflicts: they may be with packages of theirs.
    assert _pip(machine.run("demo")) == [[bootstrap.TORCH, *RESOLVED], ["--no-deps", *NO_DEPS, "-e", "."]]
    python.unlink()
    with pytest.raises(SystemExit, match="has no working Python with pip"):
        machine.run("demo")
    assert theirs.exists()


def test_another_python_is_refused_before_anything_is_changed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for of, name, value, said in (
        (sys, "version_info", (3, 8, 18, "final", 0), r"ddpshim needs 3\.9 or newer; nothing was changed"),
        (bootstrap.importlib.util, "find_spec", lambda _: None, "python3-venv"),  # no ensurepip
        (bootstrap, "FIRST_TOO_NEW", (3, 0), r"Python 3\.\d+, .* Run bootstrap.py with Python 3.9, 3.10 or 3.11"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(of, name, value)
            with pytest.raises(SystemExit, match=said):
                machine.run("demo")
        assert machine.calls == []
        assert not machine.venv.exists()
    monkeypatch.setattr(bootstrap, "FIRST_TOO_NEW", (3, 0))
    machine.modules.add("torchvision")  # it was installed in some other way
    assert machine.run("demo")[-1] == ["examples/same_experiment.py"]
    python, stamp = bootstrap.python_of(machine.venv), machine.venv / bootstrap.STAMP
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "THIS_PYTHON", "cpython-399")
        with pytest.raises(SystemExit, match=r"made with cpython-\d+, .*--venv \.venv-cpython-399"):
            machine.run("demo")
        assert (machine.calls, stamp.exists()) == ([], True)
    stamp.unlink()  # an unfinished environment does not delete itself
    monkeypatch.setattr(sys, "prefix", str(machine.venv))
    with pytest.raises(SystemExit, match="deactivate"):
        machine.run("demo")
    assert python.exists()


def test_the_torch_of_the_caller_is_seen_through_paths_with_spaces(tmp_path: Path) -> None:
    theirs, venv = tmp_path / "their packages" / "torch", tmp_path / "with space" / ".venv"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").touch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=patience(DEADLINE_S))
    code = (
        "import importlib.util, sys, pathlib; sys.path.insert(0, sys.argv[1]); import bootstrap\n"
        "venv = pathlib.Path(sys.argv[2]); print(bootstrap.torch_of_the_caller(venv)); bootstrap.share_torch(venv)\n"
        "print(bootstrap.asked(venv, 'import torch; print(torch.__file__)')); bootstrap.share_torch(venv)"
    )
    environ = {**os.environ, "PYTHONPATH": ""}
    caller = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(theirs.parent)!r})\n{code}"]
    ran = subprocess.run([*caller, str(ROOT), str(venv)], env=environ, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        str(theirs.parent),
        f"using the torch in {theirs.parent}",
        str(theirs / "__init__.py"),  # and the second time it has one: nothing is said
    ]


def test_the_lock_is_held_until_the_last_that_writes_has_ended_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    started, may_end = tmp_path / "started", tmp_path / "may_end"
    code = (
        "import pathlib, sys, time; started, may_end = map(pathlib.Path, sys.argv[1:]); started.touch()\n"
        f"end = time.monotonic() + {patience(DEADLINE_S)}\n"
        "while not may_end.exists() and time.monotonic() < end: time.sleep(0.01)"
    )
    with bootstrap.locked(tmp_path / ".venv") as held:
        command = [sys.executable, "-c", code, str(started), str(may_end)]
        pip = threading.Thread(target=bootstrap.call, args=(command, held), daemon=True)
        pip.start()
        while not started.exists() and pip.is_alive():
            time.sleep(0.01)
    # Out of the block as after a kill of bootstrap alone: its pip still runs.
    with open(tmp_path / ".venv.lock") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        may_end.touch()
        pip.join(patience(DEADLINE_S))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for ends, code in (("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)):
        with pytest.raises(SystemExit) as ended:
            bootstrap.call([sys.executable, "-c", f"import os, sys; {ends}"])
        assert ended.value.code == code


def test_arguments_of_test_go_to_pytest_but_for_fast_and_daily(machine: Machine) -> None:
    linters = [["-m", "ruff", "check", "."], ["-m", "ruff", "format", "--check", "."]]
    tests = ["-m", "pytest", "-n", "4", "--dist", "loadfile"]
    plain = machine.run("test", "-k", "one or two", "--fa", "tests/house/test_layout.py")[-1]
    assert plain == [*tests, "-m", "not daily", "-k", "one or two", "--fa", "tests/house/test_layout.py"]
    assert machine.run("test", "--fast", "-x") == [*linters, [*tests, "tests/promises", "-x"]]
    assert machine.run("test", "--daily") == [*linters, tests]
    with pytest.raises(SystemExit):
        machine.run("demo", "--fast")


# The demo


@pytest.mark.robomimic
@pytest.mark.launch
def test_the_demo_tells_the_same_experiment_from_a_port_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("robomimic") is None:
        pytest.skip("robomimic is not installed")
    installed = same_experiment.released_robomimic("bc")
    before = {path: path.read_bytes() for path in installed.rglob("*") if path.suffix == ".py"}
    environ = preloaded().shell_environment(same_experiment.robomimic_as_released("bc"))
    monkeypatch.setattr(sys, "executable", str(commands() / "python"))  # its processes are forks
    assert environ["PYTHONHASHSEED"] == "0", "ranks would warn that sets of strings differ"
    out = tmp_path / "with space"
    out.mkdir()
    one, many, by_hand = (
        same_experiment.train("bc", way, ranks, 3, 2, out / way, environ, **{"experiment.save.epochs": [1]})
        for way, ranks in (("released", 1), ("ddpshim", 2), ("by_hand", 2))
    )
    assert many.losses == pytest.approx(one.losses, rel=1e-5)
    assert [len(shard) for shard in many.samples] == [300, 300]
    assert same_experiment.report("bc", 2, one, many, by_hand)
    assert not same_experiment.report("bc", 2, one, by_hand, many)
    assert {path: path.read_bytes() for path in installed.rglob("*") if path.suffix == ".py"} == before
    assert same_experiment.draw("bc", 2, one, many, by_hand, out).stat().st_size > 10_000
    monkeypatch.setattr(same_experiment, "RUN_DEADLINE_S", 0)
    with pytest.raises(SystemExit, match="'released' on 1 processes was stopped after 0 minutes, the limit of this"):
        same_experiment.train("bc", "released", 1, 3, 2, out / "late", environ)


def test_a_second_demo_deletes_nothing_and_without_robomimic_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    out = tmp_path / "out" / "bc"
    for _ in range(2):
        with same_experiment.emptied(out) as folder:
            assert list(folder.iterdir()) == []
            (folder / "loss").touch()
            with pytest.raises(SystemExit, match=r"another folder with --out"), same_experiment.emptied(out):
                pass
            assert (folder / "loss").exists()
            with same_experiment.emptied(tmp_path / "other" / "bc"):
                pass
    monkeypatch.setattr(same_experiment.importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("DDPSHIM_UPSTREAM", raising=False)
    for algorithm, said in (("bc", r"bootstrap\.py demo"), ("diffusion_policy", "DDPSHIM_UPSTREAM")):
        with pytest.raises(SystemExit, match=said):
            same_experiment.released_robomimic(algorithm)


def test_pytest_alone_finds_the_tests() -> None:
    """What `pip install pytest` brings is enough for a first look, without the plugins that bootstrap.py installs."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    alone = ("-m", "pytest", "-q", "-p", "no:timeout", "-p", "no:xdist", "--collect-only", "tests/promises")
    assert " tests collected" in python(*alone, environ=environ, cwd=ROOT, deadline_s=DEADLINE_S)
