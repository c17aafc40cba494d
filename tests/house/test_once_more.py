"""A test that starts real processes is run once more, and its first failure is shown and counted."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests import once_more
from tests.once_more import _AGAIN
from tests.preloaded_commands import python

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

@pytest.mark.skip(reason="left out")
def test_left_out():
    pass

def test_good():
    pass
"""
FAIL = """
def test_bare():
    fail_first("bare")

@pytest.mark.launch
def test_always():
    raise ValueError
"""


def _pytest(folder: Path, *options: str, code: int = 0) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST") and name != _AGAIN}
    command = ["-m", "pytest", "-p", "tests.once_more", "-p", "no:cacheprovider", *options]
    return python(*command, environ={**own, "PYTHONPATH": str(ROOT)}, code=code, cwd=folder)


@pytest.mark.parametrize(("more", "options"), [("", ("-n", "1")), (FAIL, ())])
def test_what_is_marked_and_passes_alone_is_no_failure(tmp_path: Path, more: str, options: tuple[str, ...]) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text(TESTS + more)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = launch: see tests/once_more.py\n")
    said = _pytest(tmp_path, "-rs", *options, code=bool(more))
    assert "FLAKY test_it.py::test_marked: failed, then passed alone" in said
    assert "ValueError: marked came first" in said.split("FLAKY")[1]
    assert said.count("FLAKY") == 1
    assert "left out" in said.split("FLAKY")[0], "it is the last that is read"
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (\w+)", said.splitlines()[-1])}
    assert (counts["flaky"], counts["passed"], counts.get("failed", 0)) == (1, 1, 2 * bool(more))


def test_of_a_process_that_is_killed_the_tests_are_run_by_others(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    killed = "    if not there.exists():\n        there.touch()\n        os.kill(os.getpid(), 9)\n"
    for number in range(20):  # most of them are done, and must not be waited for
        act = killed if number == 17 else "    there.touch()\n"
        lines = "import os, pathlib\n\ndef test_it():\n    there = pathlib.Path(__file__).with_suffix('.there')\n" + act
        (tmp_path / f"test_{number:02}.py").write_text(f"{lines}\ndef test_next():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    said = _pytest(tmp_path, "-n", "2", "--dist", "loadfile")
    assert re.search(r"gw\d ended: exit code -9\n", said)
    assert re.search(r"FLAKY test_17.py::test_it: failed.*\n(.*\n)?.*crashed while running 'test_17.py::test_it'", said)
    assert re.search(r"40 passed, 1 flaky", said)


@pytest.mark.unit
def test_what_comes_to_no_end_alone_fails(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=subprocess.TimeoutExpired("pytest", 600)))
    assert once_more._passes("test_it.py::test_marked", pytestconfig) is False
