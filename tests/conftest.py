"""What the tests of all files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports torch. Who waits at a store whose host has left first says so in C++, with a stack, now and
# then; tests compare what programs print.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# The files that take longest are started first: two of them at the end would leave one of two processes idle.
LONGEST = [
    f"test_{name}.py"
    for name in (
        *("resume", "auto", "robomimic", "docs", "launch_matrix", "convert", "group", "faults"),
        *("selftest", "checkpoint", "audit", "report", "examples", "course"),
    )
]


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would start those with the most tests first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the releases of robomimic are copied to by the tests that leave the copies as they are.

    A copy has one process that imported it, from which all of its trainings are forked: see tests/preloaded.py.
    """
    return tmp_path_factory.mktemp("releases")
