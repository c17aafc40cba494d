"""What the tests of all files share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.once_more import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401
from tests.preloaded_commands import SOCKET

# Each process of the tests would compile the library anew, a second of CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Before anything imports torch. Who waits at a store whose host has left first says so in C++, with a stack, now and
# then; tests compare what programs print.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# The files that take longest are started first: one of them at the end would leave the other processes idle.
LONGEST = [
    f"test_{name}.py"
    for name in (
        *("simulated_gpus", "gpu_selftest", "auto", "robomimic", "examples", "resume", "parallel", "docs", "runner"),
        *("group", "audit", "data_kinds", "equivalence", "noise", "course", "guard", "report", "types", "unedited"),
        *("rollout", "launch_matrix", "faults", "selftest", "packaging", "options", "background", "sampler", "slurm"),
        *("layout", "checkpoint"),
    )
]


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would start those with the most tests first
    if getattr(config.option, "numprocesses", None) and SOCKET not in os.environ:
        from tests.preloaded import preloaded

        os.environ[SOCKET] = preloaded().socket  # one for all of xdist's processes


# What the tests of a file are that do not say it themselves, see `markers` in pyproject.toml; of other files: unit.
TIERS = {
    **dict.fromkeys(("guard", "parallel", "resume", "seams", "second_job", "sequences"), "ranks"),
    **dict.fromkeys(("auto", "background", "bootstrap", "data_kinds", "droid", "equivalence", "field"), "launch"),
    **dict.fromkeys(
        ("examples", "examples_launch", "import_cost", "launch_matrix", "once_more", "packaging", "unedited"), "launch"
    ),
    **dict.fromkeys(("preloaded", "rlds", "robocasa", "robomimic", "rollout", "runner", "tfdata"), "launch"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        own = [mark.name for mark in item.iter_markers() if mark.name in ("unit", "ranks", "launch")]
        tier = own[0] if own else TIERS.get(item.path.stem.removeprefix("test_"), "unit")
        trains = any(item.get_closest_marker(name) for name in ("robomimic", "simulator", "upstream"))
        item.add_marker("train" if tier == "launch" and trains else tier)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


_started: list[str] = []


def _take_note(event: str, args: Any) -> None:
    # By the name of a file one connects to the server that tests/ranks.py forks from.
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
    """After each test the process is in no job, nor was it in one: the next test may be of any file."""
    yield
    if "ddpshim.job.job" in sys.modules:
        import ddpshim
        from ddpshim.job import job

        ddpshim.cleanup()
        job.begin_next()
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN:  # a training was complete; who is started would be deaf
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the releases of robomimic are copied to by the tests that leave the copies as they are.

    A copy has one process that imported it, from which all of its trainings are forked: see tests/preloaded.py.
    """
    return tmp_path_factory.mktemp("releases")
