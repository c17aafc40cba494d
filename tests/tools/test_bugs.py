"""The collection of silent bugs: its programs are well-formed, and evidence/bugs.md is about them."""

from __future__ import annotations

import re

import pytest

from evidence.bugs import BUGS, PAGE, START, Answer, Bug, Result, look, read_page, report

NAMED = {bug.name: bug for bug in BUGS}
TOLD = read_page(PAGE.read_text())


def _bug(*means: str) -> Bug:
    return Bug("a bug", "data", ["https://github.com/someone/trainer/issues/1"], ["raw"], frozenset(means), False, {})


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_program_and_its_twin(bug: Bug) -> None:
    for trainer in bug.trainers:
        buggy, clean = (bug.program(trainer, is_clean) for is_clean in (False, True))
        assert buggy != clean
        for program in (buggy, clean):
            compile(program, bug.name, "exec")


def test_the_page_is_about_the_collection() -> None:
    """Where it fails: python -m evidence.bugs --write evidence/bugs.md (minutes; with --only WORDS, the rest stays)."""
    assert set(TOLD) == set(NAMED)
    page = PAGE.read_text()
    tables = report([TOLD[bug.name] for bug in BUGS])
    assert page.partition(START)[2] == "\n" + tables
    (together,) = (line for line in tables.splitlines() if line.startswith("| together |"))
    found, alarms = re.findall(r"(\d+) of 63", together)
    assert f"[bugs](bugs.md): {found} of 63, with {alarms} false alarm" in (PAGE.parent / "README.md").read_text()


def test_what_counts_as_found() -> None:
    """The answer names the bug, and is not given of the twin as well."""
    said = {"check": Answer(["gradients", "order"], where="head.weight and 1 more")}
    silent = {"check": Answer()}
    assert Result(_bug("order"), said, silent).right("check") == ["order"]
    assert Result(_bug("order"), said, {"check": Answer(["order"])}).right("check") == []
    assert Result(_bug("gradients:head.weight"), said, silent).is_found
    assert not Result(_bug("gradients:body.weight", "noise"), said, silent).is_found
    page = report([Result(_bug("order"), said, silent), Result(_bug("loss"), said, said)])
    assert "| check | 1 of 2 (50%) | 1 of 2 (50%) |" in page
    assert "| together | 1 of 2 (50%) | 1 of 2 (50%) |" in page


@pytest.mark.launch
def test_guards_find_as_the_page_says() -> None:
    """What `check` finds: tests/tools/test_check.py."""
    bug = NAMED["a checkpoint is loaded on the main rank alone"]
    for is_clean, told in enumerate((TOLD[bug.name].buggy, TOLD[bug.name].clean)):
        assert look("guards", bug.program(bug.trainers[-1], bool(is_clean))) == Answer(told["guards"].findings)
    assert TOLD[bug.name].right("guards")
