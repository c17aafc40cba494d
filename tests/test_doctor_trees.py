"""The labels are well-formed, and the judge of the doctor counts as its page says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.doctor_trees import LABELS, NEAR, Finding, Run, judge, report

TREES = json.loads(LABELS.read_text(encoding="utf-8"))["trees"]


def a_tree(**changes: Any) -> dict[str, Any]:
    tree = {
        "repository": "https://github.com/someone/trainer",
        "commit": "0123456789",
        "folder": "someone+trainer-0123456",
        "kind": "moved by hand",
        "held_out": False,
        "read": ["train.py"],
        "uncoded": [],
        "verdicts": [
            {"code": "DDP401", "file": "tool.py", "line": 9, "true": False, "why": "no trainer"},
            {"code": "DDP401", "file": "old.py", "line": 5, "true": True, "why": "another trainer"},
            {"code": "DDP601", "file": "eval.py", "line": 3, "true": None, "why": "only on the robot"},
        ],
        "hazards": [
            {"code": "DDP301", "file": "train.py", "lines": [20, 22], "why": "one seed", "also": [["seed.py", 5]]},
            {"code": "DDP401", "file": "train.py", "lines": [40, 40], "why": "all ranks write"},
            {"code": "DDP206", "file": "train.py", "lines": [60, 60], "why": "batch", "optional": True},
        ],
    }
    return {**tree, **changes}


@pytest.mark.parametrize(
    ("finding", "kind"),
    [
        (Finding("DDP301", "train.py", 20 - NEAR), "true"),
        (Finding("DDP301", "train.py", 22 + NEAR), "true"),
        (Finding("DDP301", "train.py", 22 + NEAR + 1), "unjudged"),
        (Finding("DDP301", "seed.py", 5), "true"),
        (Finding("DDP302", "train.py", 20), "unjudged"),
        (Finding("DDP301", "other.py", 20), "unjudged"),
        (Finding("DDP206", "train.py", 60), "true"),
        (Finding("DDP401", "tool.py", 9), "false"),
        (Finding("DDP401", "old.py", 5), "true"),
        (Finding("DDP601", "eval.py", 3), "debatable"),
    ],
)
def test_a_finding_is_sorted_by_code_file_and_nearness(finding: Finding, kind: str) -> None:
    score = judge([finding], a_tree())
    counts = {name: len(getattr(score, name)) for name in ("true", "false", "debatable", "unjudged")}
    assert counts == {**dict.fromkeys(counts, 0), kind: 1}


def test_two_findings_of_one_label_find_it_once_and_optional_labels_are_not_missed() -> None:
    score = judge([Finding("DDP301", "train.py", 20), Finding("DDP301", "train.py", 22)], a_tree())
    assert len(score.true) == 2
    assert [hazard.code for hazard in score.found] == ["DDP301"]
    assert [hazard.code for hazard in score.missed] == ["DDP401"]


def test_debatable_findings_count_as_neither_true_nor_false() -> None:
    findings = [
        Finding("DDP301", "train.py", 20),
        Finding("DDP401", "tool.py", 9),
        Finding("DDP601", "eval.py", 3),
        Finding("DDP601", "new.py", 1, "not judged"),
    ]
    page = report([Run(a_tree(), judge(findings, a_tree()), num_lines=100, seconds=0.5)])
    assert "| moved by hand | 100 | 0.5 | 4 | 1 | 1 | 2 | 2 | 1 | 50% | 50% |" in page
    assert "`DDP401 tool.py:9` no trainer" in page
    assert "`DDP401 train.py:40` all ranks write" in page
    assert "`DDP601 new.py:1` not judged" in page


@pytest.mark.parametrize("tree", TREES, ids=[tree["folder"] for tree in TREES])
def test_labels_are_of_files_that_were_read_and_each_has_a_reason(tree: dict[str, Any]) -> None:
    assert tree["folder"] == tree["repository"].removeprefix("https://github.com/").replace("/", "+") + (
        "-" + tree["commit"][:7]
    )
    for hazard in tree["hazards"]:
        assert hazard["file"] in tree["read"] or hazard.get("optional"), hazard
        assert hazard["lines"][0] <= hazard["lines"][1]
        assert hazard["why"]
    verdicts = [(entry["code"], entry["file"], entry["line"]) for entry in tree["verdicts"]]
    assert len(verdicts) == len(set(verdicts))
    assert all(entry["why"] for entry in tree["verdicts"])


def test_enough_trees_were_read_and_some_were_held_out() -> None:
    assert len(TREES) >= 8
    assert sum(tree["kind"] == "moved by hand" for tree in TREES) >= 4
    assert 2 <= sum(tree["held_out"] for tree in TREES) <= 3
