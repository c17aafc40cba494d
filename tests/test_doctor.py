"""The doctor: every page's examples, and what the command says, ignores, fixes and returns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpshim.doctor.checking import check
from ddpshim.doctor.findings import CODES

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "doctor"


def _examples(code: str) -> tuple[str, str]:
    """The failing and the fixed program of a page."""
    page = (PAGES / f"{code}.md").read_text()
    failing, fixed = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return failing, fixed


def _found(path: Path) -> list[tuple[str, int]]:
    return [(f.code, f.line) for f in check(path).findings]


@pytest.mark.parametrize("code", CODES)
def test_each_pages_failing_example_has_exactly_its_finding_and_the_fixed_one_none(code: str, tmp_path: Path) -> None:
    failing, fixed = _examples(code)
    path = tmp_path / "train.py"
    path.write_text(failing)
    marked = [(code, number) for number, line in enumerate(failing.split("\n"), 1) if line.endswith(f"# {code}")]
    assert len(marked) == 1
    assert _found(path) == marked
    path.write_text(fixed)
    assert _found(path) == []
