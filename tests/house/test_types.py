"""mypy finds nothing in the package, and in typed.py what it should. Beside other tests it takes half as long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preloaded_commands import python

ROOT = Path(__file__).parents[2]


@pytest.mark.launch
def test_the_package_has_the_types_that_it_says() -> None:
    python("-m", "mypy", cwd=ROOT)  # 20 s on a machine where torch is imported in 2
