"""The patched robomimic on data of every kind: three ranks against the release in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from evidence.equivalence import VALIDATION, Run, copy_release, largest_difference, make_config, make_data, train_all
from tests.robomimic import require

RELEASE = "0.3.0"
SINCE_0_5 = "0.5.0"
STEPS, EPOCHS = 4, 2
Pairs = dict[str, tuple[Run, Run]]

SMALL = {**VALIDATION, "train__batch_size": 20}
PLAIN_IMAGES = {
    "observation__encoder__rgb__obs_randomizer_class": None,
    "observation__encoder__rgb__core_kwargs__pool_class": None,
}
GOALS = {
    "train__goal_mode": "last",
    "train__hdf5_load_next_obs": True,
    "observation__modalities__goal__low_dim": ["object"],
}

# What distinguishes a kind of data from the template of its algorithm.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "cache_all": ("bc", SMALL),
    "workers": (
        "bc",
        {**SMALL, "train__hdf5_cache_mode": None, "train__hdf5_use_swmr": False, "train__num_data_workers": 2},
    ),
    "images_from_the_file": ("bc_image", {**PLAIN_IMAGES, "train__hdf5_cache_mode": "low_dim"}),
    "sequences_with_goals": (
        "bc_rnn",
        {**VALIDATION, **GOALS, "train__pad_seq_length": False, "experiment__validation_epoch_every_n_steps": None},
    ),
    # All that 0.3.0 can normalize is a batch of one sample, which ranks do not divide.
    "normalized_obs": ("bc", {"train__hdf5_normalize_obs": True, "train__batch_size": 1}),
    # 831 and 253 samples, 3 batches and 1: both loaders start over within an epoch.
    "small_filter_keys": ("bc", {**VALIDATION, "train__hdf5_filter_key": "20_demos", "train__batch_size": 250}),
}
TOO_SMALL = ("bc", {**VALIDATION, "train__hdf5_validation_filter_key": "one_demo"})


def _make_files(folder: Path) -> None:
    """lift_50.hdf5, with a filter key for few samples; lift_10.hdf5, whose actions are others; and one of images."""
    make_data(folder, 10, images=True)
    with h5py.File(make_data(folder, 50), "r+") as file, h5py.File(make_data(folder, 10), "r+") as other:
        file["mask/one_demo"] = file["mask/valid"][:1]
        for demo in other["data"].values():
            demo["actions"][...] = 1.5 * demo["actions"][()]


def _make_config(release: str, tree: Path, kind: tuple[str, dict[str, Any]], folder: Path, files: Path) -> Path:
    """A config file of a kind of data in `folder`; paths to data are relative to `files`."""
    variant, settings = kind
    name = "lift_10_images.hdf5" if "image" in variant else "lift_50.hdf5"
    data: Any = str(files / name)
    if release >= "0.5":
        data = [{**part, "path": str(files / part["path"])} for part in settings.get("train__data", [{"path": name}])]
    folder.mkdir()
    return make_config(tree, variant, files / name, folder, STEPS, EPOCHS, **{**settings, "train__data": data})


def _train_kinds(release: str, kinds: dict[str, tuple[str, dict[str, Any]]], folder: Path, releases: Path) -> Pairs:
    require(release)
    _make_files(folder)
    tree, plain = copy_release(release, releases), copy_release(release, releases, "plain")
    configs = {name: _make_config(release, tree, kind, folder / name, folder) for name, kind in kinds.items()}
    alone = train_all(plain, [(config, folder / name / "plain", None) for name, config in configs.items()])
    runs = train_all(tree, [(config, folder / name / "3", 3) for name, config in configs.items()])
    return dict(zip(kinds, zip(alone, runs)))


def _check_same_experiment(one: Run, three: Run, kind: tuple[str, dict[str, Any]]) -> None:
    for run in (one, three):
        assert run.exit_code == 0, run.log[-3000:]
    alone = one.observed[0]
    assert len(alone["batches"]["Train"]) == STEPS * EPOCHS
    assert {len(batch) for batch in alone["batches"]["Train"]} == {one.batch_size}
    for observed in three.observed:
        assert observed["batches"] == alone["batches"]
        assert largest_difference(observed["initial"], alone["initial"]) == 0
        assert largest_difference(observed["networks"], alone["networks"]) < 1e-6
        assert largest_difference(observed["networks"], three.observed[0]["networks"]) == 0
        assert _flat(observed["statistics"]) == _flat(alone["statistics"])
    assert largest_difference(alone["initial"], alone["networks"]) > 5e-4, "nothing was trained"
    assert three.losses() == pytest.approx(one.losses(), rel=1e-5)
    assert len(one.losses()) == EPOCHS
    assert three.losses("Validation") == pytest.approx(one.losses("Validation"), rel=1e-5)
    assert len(one.losses("Validation")) == (EPOCHS if "experiment__validate" in kind[1] else 0)


def _flat(tree: Any, path: str = "") -> dict[str, list[float]]:
    """Every array in `tree` by its path, so that two trees are compared bit for bit."""
    if isinstance(tree, dict):
        return {at: array for key, value in tree.items() for at, array in _flat(value, f"{path}/{key}").items()}
    return {} if tree is None else {path: np.ravel(tree).tolist()}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, releases: Path) -> Pairs:
    return _train_kinds(RELEASE, {**KINDS, "too_small": TOO_SMALL}, tmp_path_factory.mktemp("kinds"), releases)


@pytest.mark.robomimic
@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks_train_the_same_experiment(pairs: Pairs, kind: str) -> None:
    _check_same_experiment(*pairs[kind], KINDS[kind])


@pytest.mark.robomimic
def test_how_samples_are_read_changes_nothing(pairs: Pairs) -> None:
    for run, reference in zip(pairs["workers"], pairs["cache_all"]):
        assert run.observed[0]["batches"] == reference.observed[0]["batches"]
        assert largest_difference(run.observed[0]["networks"], reference.observed[0]["networks"]) == 0


@pytest.mark.robomimic
def test_a_pass_ends_and_another_begins_within_an_epoch(pairs: Pairs) -> None:
    batches = pairs["small_filter_keys"][0].observed[0]["batches"]
    first_epoch = batches["Train"][:STEPS]
    assert len({index for batch in first_epoch[:3] for index in batch}) == 750, "a pass repeats samples"
    assert len({tuple(batch) for batch in batches["Train"]}) == STEPS * EPOCHS
    assert len(batches["Validation"]) == 3 * EPOCHS
    assert len({tuple(batch) for batch in batches["Validation"][:3]}) == 3


@pytest.mark.robomimic
def test_observations_are_normalized_by_the_whole_file(pairs: Pairs) -> None:
    _, three = pairs["normalized_obs"]
    saved = three.checkpoint["obs_normalization_stats"]
    for observed in three.observed:
        assert _flat(saved) == _flat(observed["statistics"]["obs"])
    assert len(saved) == 4
    for key, found in saved.items():
        values = _read(three.folder.parent.parent / "lift_50.hdf5", f"obs/{key}")
        np.testing.assert_allclose(np.ravel(found["mean"]), values.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(np.ravel(found["std"]), values.std(0) + 1e-3, rtol=1e-4)


def _read(path: Path, key: str) -> Any:
    with h5py.File(path) as file:
        return np.concatenate([demo[key][()] for demo in file["data"].values()])


@pytest.mark.robomimic
def test_a_validation_set_smaller_than_a_batch_is_refused(pairs: Pairs) -> None:
    one, three = pairs["too_small"]
    assert "run failed with error:\n\n" in one.log, "upstream's own words: StopIteration has none"
    assert three.exit_code != 0
    assert "finished run successfully" not in three.log
    said = (
        "DataError: a validation epoch has 3 steps, but its 47 samples are fewer than a batch of 100 (train.batch_size"
    )
    assert said in three.log, three.log[-3000:]


WEIGHTED = [{"path": "lift_50.hdf5", "weight": 1.0}, {"path": "lift_10.hdf5", "weight": 20.0}]
WEIGHTED_BY_SIZE = [
    {"path": "lift_50.hdf5", "weight": 1.0, "filter_key": "train"},
    {"path": "lift_10.hdf5", "weight": 3.0, "demo_limit": 5},
]
KINDS_SINCE_0_5: dict[str, tuple[str, dict[str, Any]]] = {
    "weighted_gaussian_actions": (
        "bc",
        {
            **VALIDATION,
            "train__hdf5_cache_mode": "low_dim",  # upstream caches no more where datasets are several
            "train__data": WEIGHTED,
            "train__action_config": {"actions": {"normalization": "gaussian"}},
        },
    ),
    "weighted_by_size": (
        "bc",
        {
            "train__data": WEIGHTED_BY_SIZE,
            "train__normalize_weights_by_ds_size": True,
            "train__hdf5_cache_mode": None,
            "train__num_data_workers": 2,
            "train__batch_size": 20,
        },
    ),
    "min_max_actions_and_obs": (
        "bc_rnn",
        {"train__action_config": {"actions": {"normalization": "min_max"}}, "train__hdf5_normalize_obs": True},
    ),
}


@pytest.fixture(scope="module")
def pairs_since_0_5(tmp_path_factory: pytest.TempPathFactory, releases: Path) -> Pairs:
    return _train_kinds(SINCE_0_5, KINDS_SINCE_0_5, tmp_path_factory.mktemp("kinds"), releases)


@pytest.mark.upstream
@pytest.mark.parametrize("kind", KINDS_SINCE_0_5)
def test_three_ranks_train_the_same_experiment_since_0_5(pairs_since_0_5: Pairs, kind: str) -> None:
    _check_same_experiment(*pairs_since_0_5[kind], KINDS_SINCE_0_5[kind])
    for run in pairs_since_0_5[kind]:
        for observed in run.observed:
            for of in ("obs", "action"):
                saved = _flat(run.checkpoint.get(f"{of}_normalization_stats"))
                assert saved == _flat(observed["statistics"][of])
