"""Fixtures, hooks and checks for all tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.once_more import (  # noqa: F401
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_xdist_make_scheduler,
)
from tests.preloaded_commands import SOCKET

# Otherwise each process of the tests would compile the library again, a second of CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Before torch is imported. A process that waits at a store whose host has left sometimes logs a C++ stack; tests
# compare the output of programs.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# All tests run on CPUs, or on simulated GPUs: on one real GPU `run` would refuse two ranks.
if any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# One thread for each process, as torchrun has it: four processes of tests share few cores, and a thread that waits for
# another one keeps its core busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The files that take longest start first: at the end one of them would leave the other processes idle.
LONGEST = [
    f"test_{name}.py"
    for name in (
        *("one_process", "rows", "check", "capture", "at_once", "graphs"),
        *("simulated_gpus", "robomimic", "examples", "resume", "parallel", "docs", "runner"),
        *("group", "data_kinds", "equivalence", "noise", "course", "guard", "report", "unedited"),
        *("rollout", "launch_matrix", "faults", "selftest", "packaging", "options", "background", "sampler", "slurm"),
        *("layout", "checkpoint"),
    )
]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):  # of pyproject.toml, which pytest alone does not know
        parser.addini("timeout", "ignored: it needs pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would start the files with the most tests first
    if getattr(config.option, "numprocesses", None) and SOCKET not in os.environ:
        from tests.preloaded import preloaded

        os.environ[SOCKET] = preloaded().socket  # one for all of xdist's processes


# The marker of unmarked tests, by file (see `markers` in pyproject.toml); in other files: unit.
TIERS = {
    **dict.fromkeys(("guard", "parallel", "resume", "seams", "second_job", "sequences"), "ranks"),
    **dict.fromkeys(("background", "bootstrap", "data_kinds", "debugger", "droid", "equivalence", "field"), "launch"),
    **dict.fromkeys(("examples", "examples_launch", "launch_matrix", "once_more", "packaging"), "launch"),
    **dict.fromkeys(("rlds", "robocasa", "robomimic", "rollout", "runner", "unedited"), "launch"),
}

# What is printed, pages and types: they seldom fail, and take as long as what users feel. `bootstrap.py test --daily`
# runs them; these few of them always run.
DAILY = ("course", "docs", "printed", "reference", "site")
QUICK = (
    "test_each_function_says_whether_ranks_must_call_it_together",
    "test_every_page_is_in_a_list",
    "test_links_lead_somewhere",
    "test_messages_name_pages_that_the_wheel_has",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        own = [mark.name for mark in item.iter_markers() if mark.name in ("unit", "ranks", "launch")]
        tier = own[0] if own else TIERS.get(item.path.stem.removeprefix("test_"), "unit")
        trains = any(item.get_closest_marker(name) for name in ("robomimic", "simulator", "upstream"))
        item.add_marker("train" if tier == "launch" and trains else tier)
        if item.path.stem.removeprefix("test_") in DAILY and item.name.partition("[")[0] not in QUICK:
            item.add_marker("daily")
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


_started: list[str] = []


def _take_note(event: str, args: Any) -> None:
    # The server that tests/ranks.py forks from has a file name as its address.
    is_fork_server = event == "socket.connect" and isinstance(args[1], (str, bytes))
    if is_fork_server or event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        _started.append(event)


sys.addaudithook(_take_note)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test of the quick tier that starts a process."""
    _started.clear()
    yield
    if "robomimic.algo" in sys.modules:
        pytest.fail("a test imports robomimic into the process of all tests, where others hook its import: use a rank")
    if item.get_closest_marker("unit") and _started:
        pytest.fail(
            f"a test marked unit starts a process ({_started[0]}): mark it ranks or launch, see tests/conftest.py"
        )


@pytest.fixture(autouse=True)
def _no_job_is_left() -> Iterator[None]:
    """After each test leave the job and forget it: the next test may be of any file."""
    yield
    if "ddpshim.process.job" in sys.modules:
        import ddpshim
        from ddpshim.process import job

        ddpshim.cleanup()
        job.begin_next()
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN:  # set by a complete training; child processes inherit it
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for copies of robomimic's releases, for tests that do not change the copies.

    For each copy one process has imported it, from which all of its trainings are forked: see tests/preloaded.py.
    """
    return tmp_path_factory.mktemp("releases")
