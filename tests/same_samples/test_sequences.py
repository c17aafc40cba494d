"""Batches of robomimic's sequence datasets, against its own samples collated by torch: see tests/sequences.py."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import ddpshim
from ddpshim.robomimic import batches as sequences
from ddpshim.robomimic import node_memory
from ddpshim.rows import loader
from ddpshim.rows.samples import joins_samples
from tests import sequences as demos
from tests.preloaded import environment
from tests.preloaded_commands import python
from tests.ranks import run_ranks
from tests.robomimic import require

pytestmark = pytest.mark.robomimic


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("robomimic")
    demos.begin()
    return tmp_path_factory.mktemp("sequences")


def test_every_kind_of_dataset_gives_the_same_batches(folder: Path) -> None:
    found = demos.look_at(folder)
    assert {name: what for name, what in found.items() if what != "same"} == {}
    assert len(found) == 3 * len(demos.KINDS)


@pytest.mark.launch
@pytest.mark.upstream
@pytest.mark.parametrize("release", ["0.4.0", "0.5.0", "master", "robocasa"])
def test_every_kind_of_dataset_of_other_releases(tmp_path: Path, release: str) -> None:
    tree = require(release)
    said = python("-m", "tests.sequences", str(tmp_path), environ=environment(tree), deadline_s=300)
    found = dict(line.rsplit(": ", 1) for line in said.splitlines())
    assert {name: what for name, what in found.items() if what != "same"} == {}
    assert len(found) == {"0.4.0": 39, "robocasa": 50}.get(release, 53)


def test_the_comparison_can_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = sequences.Windows._sample

    def shifted(self: Any, at: Any, here: Any, *args: Any) -> Any:
        return mask(self, at, lambda key: np.roll(here(key), 1, axis=1), *args)

    monkeypatch.setattr(sequences.Windows, "_sample", shifted)
    dataset = demos.make(folder, "low_dim", seq_length=3)
    assert "come out different" in str(sequences.WindowFetcher(dataset).attach())
    assert not hasattr(dataset, "__getitems__")


@pytest.mark.unit
@pytest.mark.parametrize("what", ["dtype", "key order", "one bit", "shape"])
def test_batches_are_compared_to_the_last_bit(what: str) -> None:
    one = {"a": torch.ones(2, 2), "b": {"c": torch.tensor([0.0, float("nan")])}}
    other = {
        "dtype": {**one, "a": torch.ones(2, 2, dtype=torch.float64)},
        "key order": {"b": one["b"], "a": one["a"]},
        "one bit": {**one, "b": {"c": torch.tensor([-0.0, float("nan")])}},
        "shape": {**one, "a": torch.ones(4)},
    }[what]
    assert sequences._is_same(one, {**one, "a": one["a"].clone()})
    assert not sequences._is_same(one, other)
    assert not sequences._is_same(other, one)


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    demos.begin()
    for seed in (0, 1):
        demos.make_file(tmp_path / "new.hdf5", seed=seed).replace(tmp_path / "demos.hdf5")
        dataset, other = (demos.make(tmp_path, None, file="demos.hdf5", **demos.KINDS["images"]) for _ in range(2))
        assert sequences.WindowFetcher(dataset).attach() is None
        assert demos.is_same_batch(dataset, other)


def _subclass(**methods: Any) -> type:
    from robomimic.utils.dataset import SequenceDataset

    return type("OwnDataset", (SequenceDataset,), methods)


def _without(demo: str, key: str, path: Path, **others: Any) -> str:
    with demos.h5py.File(demos.make_file(path), "r+") as file:
        del file[f"data/{demo}/{key}"]
        for name, other in others.items():
            file[f"data/{demo}/{name.replace('__', '/')}"] = other
    return path.name


def test_what_is_not_proven_is_fetched_sample_by_sample(folder: Path) -> None:
    def get_item(self: Any, index: int) -> Any:
        return {"twice": 2 * index}

    makes = {
        "the code of OwnDataset is not one": lambda: demos.make(folder, None, _subclass(get_item=get_item)),
        "of OwnDataset is not one": lambda: demos.make(folder, None, _subclass(get_dataset_for_ep=lambda *args: 0)),
        "actions is read from the file, where it is chunked or compressed": lambda: demos.make(
            folder, None, file=demos.make_file(folder / "chunked.hdf5", compression="gzip").name
        ),
        "there are demonstrations without obs/object": lambda: demos.make(
            folder, None, file=_without("demo_1", "obs/object", folder / "without.hdf5")
        ),
        "AttributeError: 'Group' object has no attribute 'shape'": lambda: demos.make(
            folder, None, file=_without("demo_0", "rewards", folder / "group.hdf5", rewards__deep=1.0)
        ),
        "rewards differs in shape or type from": lambda: demos.make(
            folder, None, file=_without("demo_0", "rewards", folder / "ragged.hdf5", rewards=np.zeros((12, 2)))
        ),
        "rewards is shorter than its demonstration": lambda: demos.make(
            folder, None, file=_without("demo_0", "rewards", folder / "short.hdf5", rewards=np.zeros(3, int))
        ),
        "SequenceDataset itself fails (AssertionError": lambda: demos.make(
            folder, "low_dim", hdf5_normalize_obs=True, seq_length=3
        ),
        "a demonstration is shorter than what is stacked of it": lambda: demos.make(
            folder, "low_dim", frame_stack=4, pad_frame_stack=False, lengths=demos.SHORT_LENGTHS
        ),
    }
    for reason, make in makes.items():
        dataset = make()
        assert reason in str(sequences.WindowFetcher(dataset).attach())
        assert not hasattr(dataset, "__getitems__")
        assert dataset._hdf5_file is None, "workers would inherit it"
    assert makes["of OwnDataset is not one"]() is not None


def test_patched_code_is_not_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from robomimic.utils.dataset import SequenceDataset

    known = demos.make(folder, "low_dim", _subclass(get_dataset_sampler=lambda self: None))
    assert sequences._normalizing(known) == [True]
    original = SequenceDataset.get_item
    monkeypatch.setattr(SequenceDataset, "get_item", lambda self, index: original(self, index))
    dataset = demos.make(folder, "low_dim")
    with pytest.raises(sequences.Unproven, match="the code of SequenceDataset is not one that is known here"):
        sequences._normalizing(dataset)
    with pytest.raises(sequences.Unproven, match="list is no dataset of robomimic's"):
        sequences._normalizing([1, 2])
    monkeypatch.undo()
    dataset.get_item = lambda index: {}
    with pytest.raises(sequences.Unproven, match="the code of SequenceDataset is not one that is known here"):
        sequences._normalizing(dataset)


def test_a_dataset_that_changes_is_fetched_as_it_is(folder: Path) -> None:
    dataset, other = demos.make(folder, "low_dim", seq_length=3), demos.make(folder, "low_dim", seq_length=4)
    assert sequences.WindowFetcher(dataset).attach() is None
    dataset.seq_length = 4
    assert demos.is_same_batch(dataset, other)
    with pytest.raises(KeyError):
        demos.fetch(dataset, [0, len(other)])


@pytest.mark.parametrize("cache_mode", ["all", "low_dim", None])
def test_the_data_are_held_once_in_flat_arrays(folder: Path, cache_mode: Any) -> None:
    dataset, other = (demos.make(folder, cache_mode, obs_keys=(*demos.LOW_DIM, demos.IMAGE)) for _ in range(2))
    assert sequences.WindowFetcher(dataset).attach() is None
    assert sequences.WindowFetcher(dataset).attach() is None, "a second loader on it"
    assert not joins_samples(dataset), "each rank fetches its own rows"
    if cache_mode is None:
        assert dataset.hdf5_cache is None
    else:
        flat, num_rows = dataset.hdf5_cache.flat, sum(demos.LENGTHS)
        assert (flat["obs/object"].shape, flat["obs/object"].dtype) == ((num_rows, 10), np.dtype("f8"))
        assert (flat["missing"].shape, flat["missing"].dtype) == ((num_rows, 1), np.dtype("f4"))
        assert ("obs/agentview_image" in flat) == (cache_mode == "all")
        for demo, held in dataset.hdf5_cache.items():
            assert np.shares_memory(held["next_obs"]["object"], flat["next_obs/object"]), demo
            assert np.shares_memory(held["actions"], flat["actions"]), demo
    assert demos.is_same_batch(dataset, other)
    one_by_one = default_collate([dataset[index] for index in range(len(other))])
    assert sequences._is_same(one_by_one, default_collate([other[index] for index in range(len(other))]))
    if cache_mode == "all":
        assert len(dataset.getitem_cache) == len(other)
        assert list(dataset[-1]) == list(other[-1])
        with pytest.raises(IndexError):
            dataset[len(other)]
    dataset.close_and_delete_hdf5_handle()
    copied = pickle.loads(pickle.dumps(dataset))  # as for workers that are spawned
    assert demos.is_same_batch(copied, other)


def _rows(folder: str, num_workers: int) -> tuple[list[Any], bool]:
    """All numbers of two passes in a program that every rank runs whole; whether they are fetched by the batch."""
    ddpshim.cleanup()
    ddpshim.setup(batch="global", seed=1, device="cpu")
    demos.begin()
    dataset = demos.make(Path(folder), "low_dim", seq_length=3)
    how: Any = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    torch.manual_seed(4)
    batches = DataLoader(dataset, 7, shuffle=True, **how)
    found = [
        [(key, x.tolist()) for key, x in node_memory._leaves(batch).items()] for _ in range(2) for batch in batches
    ]
    return found, "__getitems__" in vars(dataset)


def test_ranks_with_row_tensors_fetch_their_rows_by_the_batch(folder: Path) -> None:
    demos.make(folder, "low_dim", seq_length=3)  # the file, before ranks look for it
    [(expected, _)] = run_ranks(_rows, 1, str(folder), 0)
    for found, by_batch in run_ranks(_rows, 3, str(folder), 2):
        assert found == expected
        assert by_batch


def _rank_reads_code_of_its_own(folder: str) -> tuple[list[int], list[str]]:
    ddpshim.cleanup()
    ddpshim.setup(batch="global", seed=1, device="cpu")
    demos.begin()
    said: list[str] = []
    loader.say_once = said.append  # type: ignore[assignment]
    dataset = demos.make(Path(folder), "low_dim", _subclass(get_item=lambda self, index: {"at": index}))
    first, *_ = DataLoader(dataset, 4)
    return first["at"].tolist(), said


def test_code_that_is_not_known_is_read_sample_by_sample_with_a_line(folder: Path) -> None:
    demos.make(folder, "low_dim")
    (found, (line,)), (same, said) = run_ranks(_rank_reads_code_of_its_own, 2, str(folder))
    assert (found, same, said) == ([0, 1, 2, 3], found, [])
    assert line.startswith("OwnDataset is read sample by sample, many times slower than by the batch: the code of")
