"""What the tests of all files share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the releases of robomimic are copied to by the tests that leave the copies as they are.

    A copy has one process that imported it, from which all of its trainings are forked: see tests/preloaded.py.
    """
    return tmp_path_factory.mktemp("releases")
