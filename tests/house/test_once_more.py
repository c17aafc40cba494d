"""A test that starts real processes is run once more, and its first failure is shown and counted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import once_more
from tests.once_more import _AGAIN
from tests.preloaded_commands import patience

ROOT = Path(__file__).parents[2]
TESTS = """
import pathlib, pytest
import ddpshim

def fail_first(name):
    there = pathlib.Path(__file__).with_name(name)
    if not there.exists():
        there.touch()
        raise ValueError(f"{name} came first")

@pytest.mark.launch
def test_marked():
    ddpshim.Options.read()  # refuses a variable that it does not know
    fail_first("marked")

def test_bare():
    BARE

def test_good():
    pass
"""


def _run(folder: Path, bare: str, *options: str) -> tuple[int, str]:
    """The exit code and the output of a session of three tests; a bare one does what `bare` says."""
    (folder / "test_it.py").write_text(TESTS.replace("BARE", bare))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = launch: see tests/once_more.py\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.once_more", "-p", "no:cacheprovider", *options]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST") and name != _AGAIN}
    environ = {**own, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=patience(240), check=False
    )
    return ran.returncode, ran.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_what_passes_alone_is_flaky_and_no_failure(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("xdist")
    code, said = _run(tmp_path, "pass", *options)
    assert code == 0, said
    assert "FLAKY test_it.py::test_marked: failed, then passed alone" in said
    assert "ValueError: marked came first" in said.split("FLAKY")[1]
    assert re.search(r"1 flaky.*2 passed|2 passed.*1 flaky", said.splitlines()[-1])
    assert "failed" not in said.splitlines()[-1]


def test_what_is_not_marked_fails(tmp_path: Path) -> None:
    code, said = _run(tmp_path, 'fail_first("bare")')
    assert code == 1
    assert re.search(r"1 failed, 1 passed, 1 flaky|1 failed, 1 flaky, 1 passed", said.splitlines()[-1]), said


def test_what_fails_again_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import pathlib\npathlib.Path.touch = lambda path: None\n")
    code, said = _run(tmp_path, "pass")
    assert code == 1
    assert "FLAKY" not in said
    assert "1 failed, 2 passed" in said.splitlines()[-1]


@pytest.mark.unit
def test_what_comes_to_no_end_alone_fails(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    def late(*args: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("pytest", 600)

    monkeypatch.setattr(subprocess, "run", late)
    assert once_more._passes("test_it.py::test_marked", pytestconfig) is False
