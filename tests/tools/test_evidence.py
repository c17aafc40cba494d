"""Programs of evidence: what benchmarks are reported with, and the collection of silent bugs."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path

import pytest

from evidence import benchmarks, bugs, image_bc, to_success
from evidence.bugs import BUGS, PAGE, Answer, Bug
from evidence.results import Result, alternate, median_and_quartiles, ratio


def test_arms_are_measured_in_alternation_and_compared_round_by_round() -> None:
    order: list[str] = []

    def arm(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = alternate({"a": lambda: arm("a"), "b": lambda: arm("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert ratio([2, 20, 6], [1, 10, 2]) == (2, (2, 2.5))
    assert median_and_quartiles([3.0]) == (3.0, (3.0, 3.0))


def test_the_table_has_targets_and_notes() -> None:
    rows = [
        Result("step", "5M", 0.9312, "x DDP", (0.91, 0.95), at_most=1.0),
        Result("data", "low_dim", 8.0, "x", at_least=10.0, note="a profile"),
    ]
    assert [row.holds for row in rows] == [True, False]
    assert Result("b", "w", math.nan, "", at_most=1.0).holds is False
    assert Result("b", "w", 7.0, "").holds is None
    lines = benchmarks.table([*rows, Result("step", "5M", 7.0, "ms")]).splitlines()
    assert lines[2] == "| 5M | 0.931 x DDP (0.91 to 0.95, ≤ 1); 7 ms |  |"
    assert lines[3] == "| low_dim | **8 x** (≥ 10) | a profile |"


def test_every_benchmark_is_found_and_an_unknown_one_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name in benchmarks.QUESTIONS:
        assert callable(importlib.import_module(f"evidence.{name}").run)
    with pytest.raises(SystemExit):
        benchmarks.main(["--only", "nothing"])
    assert "nothing is no benchmark" in capsys.readouterr().err


@pytest.mark.launch
def test_a_benchmark_that_fails_is_a_target_that_does_not_hold(tmp_path: Path) -> None:
    (found,) = benchmarks.measure("results", quick=True)  # a module without `run`
    assert found.holds is False
    assert found.note == "FAILED: exit code 1"


def test_what_was_measured_before_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"costs": 1.0, "whole_run": 2.0}
    monkeypatch.setattr(benchmarks, "measure", lambda name, quick: [Result(name, "w", values[name], "s", at_most=1.5)])
    assert benchmarks.main(["--only", "costs", "--out", str(tmp_path)]) == 0
    assert benchmarks.main(["--only", "whole_run", "--quick", "--out", str(tmp_path)]) == 1
    runs = json.loads((tmp_path / "benchmarks.json").read_text())
    assert {name: (run["quick"], run["results"][0]["value"]) for name, run in runs.items()} == {
        "whole_run": (True, 2.0),
        "costs": (False, 1.0),
    }
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| w | **2 s** (≤ 1.5) |" in page
    assert "| w | 1 s (≤ 1.5) |" in page
    assert benchmarks.main(["--only", "costs", "--out", str(tmp_path / "new")]) == 0


def test_the_first_checkpoint_that_succeeds_counts_and_the_page_says_how_surely() -> None:
    named = ["model_epoch_2_Lift_success_0.5.pth", "model_epoch_10_Lift_success_0.95.pth", "last.pth"]
    paths = [Path(name) for name in (*named, "model_epoch_4_Lift_success_0.9.pth")]
    assert to_success.first_success(paths) == (paths[-1], 4, 0.9)
    assert to_success.first_success(paths[:1]) is None
    times = {"robomimic as released": 120.0, "ddpshim, 1 rank": 90.0, "ddpshim, 2 ranks": math.inf}
    found = [
        to_success.Found(arm, seed, seconds + seed, 4, 0.9, "" if seconds == math.inf else "a.pth", 45)
        for arm, seconds in times.items()
        for seed in (1, 2, 3)
    ]
    lines = to_success.table(found, to_success.Plan())
    steps = ", ".join([str(4 * to_success.STEPS_AN_EPOCH)] * 3)
    assert lines[2] == f"| robomimic as released | 122 | 121, 122, 123 | {steps} | 135/150 | 84 to 94% |"
    assert lines[4] == "| ddpshim, 2 ranks | inf | inf, inf, inf | -, -, - | 0/0 | 0 to 100% |"


@pytest.mark.launch
@pytest.mark.parametrize("patch", image_bc.PACKAGES)
def test_the_ports_of_the_trainer_apply_and_the_readme_counts_their_lines(patch: str, tmp_path: Path) -> None:
    ported = image_bc.changed(patch, tmp_path).read_text()
    compile(ported, patch, "exec")
    assert f"import {'Accelerator' if patch == 'accelerate' else 'Fabric'}" in ported
    readme = (image_bc.ROOT / "README.md").read_text()
    assert re.search(rf"evidence/ports/{patch}\.patch\).*\| {image_bc.num_changed(patch)} \|", readme)


# Silent bugs

NAMED = {bug.name: bug for bug in BUGS}
TOLD = bugs.read_page(PAGE.read_text())


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
    tables = bugs.report([TOLD[bug.name] for bug in BUGS])
    assert page.partition(bugs.START)[2] == "\n" + tables
    (together,) = (line for line in tables.splitlines() if line.startswith("| together |"))
    found, alarms = re.findall(r"(\d+) of 63", together)
    assert f"[bugs](bugs.md): {found} of 63, with {alarms} false alarm" in (PAGE.parent / "README.md").read_text()


def test_what_counts_as_found() -> None:
    """The answer names the bug, and is not given of the twin as well."""
    said = {"check": Answer(["gradients", "order"], where="head.weight and 1 more")}
    silent = {"check": Answer()}
    assert bugs.Result(_bug("order"), said, silent).right("check") == ["order"]
    assert bugs.Result(_bug("order"), said, {"check": Answer(["order"])}).right("check") == []
    assert bugs.Result(_bug("gradients:head.weight"), said, silent).is_found
    assert not bugs.Result(_bug("gradients:body.weight", "noise"), said, silent).is_found
    page = bugs.report([bugs.Result(_bug("order"), said, silent), bugs.Result(_bug("loss"), said, said)])
    assert "| check | 1 of 2 (50%) | 1 of 2 (50%) |" in page
    assert "| together | 1 of 2 (50%) | 1 of 2 (50%) |" in page


@pytest.mark.launch
def test_guards_find_as_the_page_says() -> None:
    """What `check` finds: tests/tools/test_check.py."""
    bug = NAMED["a checkpoint is loaded on the main rank alone"]
    for is_clean, told in enumerate((TOLD[bug.name].buggy, TOLD[bug.name].clean)):
        assert bugs.look("guards", bug.program(bug.trainers[-1], bool(is_clean))) == Answer(told["guards"].findings)
    assert TOLD[bug.name].right("guards")
