"""The simulator's page: its arithmetic, its broken controls and, where robosuite is, rollouts on two ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from evidence.equivalence import batches, copy_release, largest_difference, make_config, make_data, source, train
from evidence.simulator import (
    ALGORITHMS,
    ARMS,
    QUICK,
    RELEASE,
    Arm,
    equal_weights,
    page,
    rollouts,
    success_rows,
)

INSTALLED = "0.3.0"


def _found() -> list[tuple[str, int, str, int, int]]:
    return [
        ("bc", 800, arm.name, seed, 20 - 2 * number - seed) for number, arm in enumerate(ARMS) for seed in (1, 2, 3)
    ]


def test_a_row_holds_an_arms_seeds_and_their_sum() -> None:
    rows = success_rows(_found(), 20)
    assert [row["trained"] for row in rows] == [arm.name for arm in ARMS]
    assert list(rows[1].items()) == [
        ("algorithm", "bc"),
        ("steps", 800),
        ("trained", "2 ranks"),
        ("seed 1", "17/20"),
        ("seed 2", "16/20"),
        ("seed 3", "15/20"),
        ("total", "48/60"),
        ("95%", "68 to 89%"),
    ]


STATISTICS = {"episodes": 10, "Return": 12.3456789012345, "Success_Rate": 0.9, "Horizon": 41.5}


@pytest.mark.parametrize(
    ("last_digit", "expected"), [(5, "are equal to the last digit"), (6, "are **not** equal")], ids=["equal", "unequal"]
)
def test_the_page_says_what_was_measured(last_digit: int, expected: str) -> None:
    distance = {"from one process, 20": 1e-8, "from one process, 800": 2e-2}
    row = {"algorithm": "bc", "trained": "2 ranks", "between": 0.0, "samples": "100", **distance}
    far = {**row, "trained": ARMS[2].name, "from one process, 20": 3e-2}
    other = {**STATISTICS, "Return": float(f"12.345678901234{last_digit}")}
    measured: dict[str, Any] = {
        "controls alike": last_digit == 5,
        "success": success_rows(_found(), 20),
        "detection": [row, far],
        "guards": {ARMS[2].name: "rank 1 differs", ARMS[3].name: ""},
        "same weights": [{"ranks": 1, **STATISTICS}, {"ranks": 2, **other}],
        "trained": [{"ranks": 1, **STATISTICS}],
        "versions": "robosuite 1",
        "CPU minutes": 3.2,
    }
    text = page(measured, "python -m evidence.simulator", QUICK)
    assert expected in text
    assert "- 2 ranks: 48 of 60 episodes (68 to 89%)" in text
    assert "In 1 of 2 rows the interval of a broken run overlaps that of one process" in text
    assert "from one process is\n1e-08 with two ranks, and 3e-02 or more in broken runs" in text
    assert "| bc | 800 | 2 ranks, no gradient sync | 15/20 | 14/20 | 13/20 | 42/60 | 57 to 81% |" in text
    assert "| bc | 2 ranks | 0 | 100 | 1e-08 | 2e-02 |" in text
    assert f"| 2 | 10 | 12.345678901234{last_digit} | 0.9 | 41.5 |" in text
    assert "no gradient sync: the training ends. SyncError: rank 1 differs" in text
    assert "same data on both: not detected" in text
    assert ("save exactly the same weights" in text) == (last_digit == 5)


def test_checkpoints_of_equal_weights_are_found(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.pth" for number in range(3)]
    for path, last in zip(paths, (1.0, 1.0000001, 1.0)):
        torch.save({"model": {"a": torch.zeros(2), "b": torch.tensor([last])}, "config": path.name}, path)
    assert equal_weights(paths) == [[paths[0], paths[2]], [paths[1]]]


@pytest.mark.launch
@pytest.mark.robomimic
@pytest.mark.parametrize("arm", ARMS[2:], ids=lambda arm: arm.fault)
def test_a_broken_control_is_broken(tmp_path: Path, releases: Path, arm: Arm) -> None:
    if source(INSTALLED) is None:
        pytest.skip(f"robomimic {INSTALLED} is neither installed nor under DDPSHIM_UPSTREAM")
    tree = copy_release(INSTALLED, releases)
    config = make_config(tree, "bc", make_data(tmp_path, num_demos=20), tmp_path, 3, 1, **ALGORITHMS["bc"])
    run = train(tree, config, tmp_path / "run", 2, environ=arm.environ(guard=False), forked=True)
    one, two = (observed["networks"] for observed in run.observed)
    assert (largest_difference(one, two) > 1e-4) == (arm.fault == "no_sync")
    assert [len(batch) for batch in batches(run)] == [50 if arm.fault == "same_data" else 100] * 3


@pytest.mark.simulator
def test_rollouts_in_robosuite_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    if importlib.util.find_spec("robosuite") is None:
        pytest.skip("robosuite is not installed (requirements/simulator.txt)")
    if source(RELEASE) is None:
        pytest.skip(f"robomimic {RELEASE} is not under DDPSHIM_UPSTREAM")
    one, two = rollouts(copy_release(RELEASE, tmp_path), tmp_path, None, QUICK)
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert one["episodes"] == two["episodes"] == QUICK.num_rollouts
    assert one["Return"] > 0
    for key in ("Return", "Success_Rate", "Horizon"):
        assert two[key] == pytest.approx(one[key], rel=1e-4)
