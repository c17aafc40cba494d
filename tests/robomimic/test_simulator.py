"""Rollouts in robosuite on two ranks, where it is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import h5py
import pytest

from evidence.equivalence import copy_release, make_config, make_data, train
from tests.robomimic import require

RELEASE = "0.4.0"
SETTINGS = {
    "algo__actor_layer_dims": [256, 256],
    "experiment__rollout__enabled": True,
    "experiment__rollout__n": 3,
    "experiment__rollout__horizon": 10,
    "experiment__rollout__rate": 1,
    "experiment__render_video": False,
}


def _statistics(tree: Path, data: Path, folder: Path, num_ranks: int) -> dict[str, Any]:
    config = make_config(tree, "bc", data, folder, 20, 1, **SETTINGS)
    run = train(tree, config, folder / str(num_ranks), num_ranks, environ={"OPENBLAS_NUM_THREADS": "1"})
    printed = json.JSONDecoder().raw_decode(run.log.split("Env: Lift\n")[1])[0]
    return {key: printed[key] for key in ("Return", "Success_Rate", "Horizon")}


@pytest.mark.simulator
def test_rollouts_in_robosuite_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    if importlib.util.find_spec("robosuite") is None:
        pytest.skip("robosuite is not installed (requirements/simulator.txt)")
    require(RELEASE)
    tree, data = copy_release(RELEASE, tmp_path), make_data(tmp_path)
    with h5py.File(data, "r+") as file:  # so that the return depends on every step of every episode
        described = json.loads(file["data"].attrs["env_args"])
        described["env_kwargs"]["reward_shaping"] = True
        file["data"].attrs["env_args"] = json.dumps(described)
    one, two = (_statistics(tree, data, tmp_path, num_ranks) for num_ranks in (1, 2))
    assert one["Return"] > 0
    assert two == pytest.approx(one, rel=1e-4)
