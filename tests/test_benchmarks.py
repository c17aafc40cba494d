"""Tests of what the benchmarks are measured and reported with; not of what they measure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Optional

import pytest

from benchmarks import __main__ as front
from benchmarks.results import Result, alternate, median_and_quartiles, ratio


def test_arms_are_measured_in_alternation() -> None:
    order: list[str] = []

    def arm(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = alternate({"a": lambda: arm("a"), "b": lambda: arm("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_ratio_is_taken_round_by_round() -> None:
    assert ratio([2, 20, 6], [1, 10, 2]) == (2, (2, 2.5))
    assert median_and_quartiles([3.0]) == (3.0, (3.0, 3.0))


@pytest.mark.parametrize(
    ("result", "holds"),
    [
        (Result("b", "w", 1.0, "", at_most=1.0), True),
        (Result("b", "w", 1.01, "", at_most=1.0), False),
        (Result("b", "w", 10.0, "", at_least=10.0), True),
        (Result("b", "w", 9.9, "", at_least=10.0), False),
        (Result("b", "w", math.nan, "", at_most=1.0), False),
        (Result("b", "w", math.nan, "", at_least=1.0), False),
        (Result("b", "w", 7.0, ""), None),
    ],
)
def test_a_target_holds_or_not(result: Result, holds: Optional[bool]) -> None:
    assert result.holds is holds


def test_the_table_has_targets_and_notes() -> None:
    rows = [
        Result("step", "5M", 0.9312, "x DDP", (0.91, 0.95), at_most=1.0),
        Result("data", "low_dim", 8.0, "x", at_least=10.0, note="a profile"),
    ]
    lines = front.table(rows).splitlines()
    assert lines[2] == "| step | 5M | 0.931 x DDP | 0.91 to 0.95 | ≤ 1 | yes |"
    assert lines[3] == "| data | low_dim | 8 x |  | ≥ 10 | **no** |"
    assert lines[-1] == "- data, low_dim: a profile"


def test_every_benchmark_is_found_and_an_unknown_one_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "guard_cost" in front.names()
    assert "results" not in front.names()
    with pytest.raises(SystemExit):
        front.main(["--only", "nothing"])
    assert "nothing is no benchmark" in capsys.readouterr().err


def test_a_benchmark_that_fails_is_a_target_that_does_not_hold(tmp_path: Path) -> None:
    (found,) = front.measure("results", quick=True)  # a module without `run`
    assert found.holds is False
    assert found.note == "FAILED: exit code 1"
    front.draw([found, Result("b", "w", 1.0, "", at_most=1.0)], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
