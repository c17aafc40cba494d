"""The simulator's page: its arithmetic, its broken controls and, where robosuite is, rollouts on two ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from evidence.equivalence import batches, copy_release, largest_difference, make_config, make_data, train
from evidence.simulator import (
    ALGORITHMS,
    ARMS,
    QUICK,
    RELEASE,
    Arm,
    equal_weights,
    rollouts,
)
from tests.robomimic import require

INSTALLED = "0.3.0"


def test_checkpoints_of_equal_weights_are_found(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.pth" for number in range(3)]
    for path, last in zip(paths, (1.0, 1.0000001, 1.0)):
        torch.save({"model": {"a": torch.zeros(2), "b": torch.tensor([last])}, "config": path.name}, path)
    assert equal_weights(paths) == [[paths[0], paths[2]], [paths[1]]]


@pytest.mark.launch
@pytest.mark.robomimic
@pytest.mark.parametrize("arm", ARMS[2:], ids=lambda arm: arm.fault)
def test_a_broken_control_is_broken(tmp_path: Path, releases: Path, arm: Arm) -> None:
    require(INSTALLED)
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
    require(RELEASE)
    one, two = rollouts(copy_release(RELEASE, tmp_path), tmp_path, None, QUICK)
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert one["episodes"] == two["episodes"] == QUICK.num_rollouts
    assert one["Return"] > 0
    for key in ("Return", "Success_Rate", "Horizon"):
        assert two[key] == pytest.approx(one[key], rel=1e-4)
