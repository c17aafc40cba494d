"""mypy finds nothing in the package, and in typed.py what it should. Beside other tests it takes half as long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded_commands import patience

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0  # 20 s on a machine where torch is imported in 2


@pytest.mark.launch
def test_the_package_has_the_types_that_it_says() -> None:
    command = [sys.executable, "-m", "mypy"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(DEADLINE_S))
    assert ran.returncode == 0, ran.stdout + ran.stderr
