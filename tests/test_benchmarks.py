"""Tests of what the benchmarks are measured and reported with; not of what they measure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Optional

import pytest

from benchmarks import __main__ as front
from benchmarks.results import Result, alternate, median_and_quartiles, ratio
from ddpshim.observe.ring_model import Cluster, Link, Training


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


@pytest.mark.launch
def test_a_benchmark_that_fails_is_a_target_that_does_not_hold(tmp_path: Path) -> None:
    (found,) = front.measure("results", quick=True)  # a module without `run`
    assert found.holds is False
    assert found.note == "FAILED: exit code 1"
    front.draw([found, Result("b", "w", 1.0, "", at_most=1.0)], tmp_path / "a.png")
    front.overview([found, Result("b", "w", 2.0, "", at_most=1.0)], tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


CLUSTER = Cluster("of tests", inside=Link(1e9, 0.001), between=Link(1e8, 0.01), gpus_per_node=4)


def test_a_ring_sends_twice_what_it_has() -> None:
    assert CLUSTER.all_reduce_s(1e9, 1) == 0
    assert CLUSTER.all_reduce_s(1e9, 4) == pytest.approx(2 * 3 / 4 + 6 * 0.001)
    # Three nodes: the ring inside each, and one among three.
    assert CLUSTER.all_reduce_s(1e9, 12) == pytest.approx(2 * 3 / 4 + 6 * 0.001 + 2 * 2 / 3 * 10 + 4 * 0.01)


def test_a_step_hides_all_but_what_comes_after_the_backward_pass() -> None:
    fast = Cluster("fast", Link(1e12, 0.0), Link(1e12, 0.0))
    two = Training(num_parameters=50e6, compute_s=3.0, bucket_bytes=100e6)  # two buckets, backward from 1 s on
    assert two.step_s(2, fast) == pytest.approx(3.0 + 1e8 / 1e12)
    slow = Cluster("slow", Link(1e8, 0.0), Link(1e8, 0.0))  # a second for each bucket
    assert two.step_s(2, slow) == pytest.approx(2.0 + 1 + 1)
    assert Training(50e6, 3.0, 100e6, overlaps=False).step_s(2, slow) == pytest.approx(3.0 + 1 + 1)
    assert Training(50e6, 3.0, 100e6, bytes_per_parameter=2.0).step_s(2, slow) == pytest.approx(3.5)
    assert Training(50e6, 3.0, 100e6, accumulation_steps=2).step_s(2, slow) == pytest.approx(3 + 2.0 + 1 + 1)
    assert two.efficiency(2, slow) == pytest.approx(3 / 4)


def test_what_was_measured_before_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"guard_cost": 1.0, "doctor_speed": 2.0}
    monkeypatch.setattr(front, "measure", lambda name, quick: [Result(name, "w", values[name], "s", at_most=1.5)])
    assert front.main(["--only", "guard_cost", "--out", str(tmp_path)]) == 0
    assert front.main(["--only", "doctor_speed", "--quick", "--out", str(tmp_path)]) == 1
    runs = json.loads((tmp_path / "benchmarks.json").read_text())
    assert {name: (run["quick"], run["results"][0]["value"]) for name, run in runs.items()} == {
        "doctor_speed": (True, 2.0),
        "guard_cost": (False, 1.0),
    }
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| doctor_speed | w | 2 s |  | ≤ 1.5 | **no** |" in page
    assert "| guard_cost | w | 1 s |  | ≤ 1.5 | yes |" in page
    assert (tmp_path / "benchmarks.png").exists()
    assert front.main(["--only", "guard_cost", "--out", str(tmp_path / "new")]) == 0
