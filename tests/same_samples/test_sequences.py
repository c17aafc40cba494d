"""Batches of robomimic's sequence datasets, against its own samples collated by torch: see tests/sequences.py."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import ddpshim
from ddpshim import adapters
from ddpshim.job.world import World
from ddpshim.process import say
from ddpshim.robomimic import batches as sequences
from ddpshim.robomimic import datasets, node_cache
from ddpshim.shares.loader import make_loader
from tests import sequences as demos
from tests.preloaded import environment
from tests.preloaded_commands import python
from tests.ranks import run_ranks
from tests.robomimic import require

pytestmark = pytest.mark.robomimic
HERE = World(launcher="torchrun", seed=1)


class Orders:
    """A sampler with another order in each pass, which does not depend on what workers draw."""

    num_passes = 0

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return iter(np.random.default_rng(self.num_passes).permutation(self.num_samples).tolist())


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
        here._rows = np.maximum(here._rows - 1, 0)
        return mask(self, at, here, *args)

    monkeypatch.setattr(sequences.Windows, "_sample", shifted)
    dataset = demos.make(folder, "low_dim", seq_length=3)
    assert "come out different" in str(sequences.attach(dataset))
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
        assert sequences.attach(dataset) is None
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
        assert reason in str(sequences.attach(dataset))
        assert not hasattr(dataset, "__getitems__")
        assert dataset._hdf5_file is None, "workers would inherit it"
    assert makes["of OwnDataset is not one"]() is not None


def test_patched_code_is_not_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from robomimic.utils.dataset import SequenceDataset

    known = demos.make(folder, "low_dim", _subclass(get_dataset_sampler=lambda self: None))
    assert sequences.is_known(known)
    original = SequenceDataset.get_item
    monkeypatch.setattr(SequenceDataset, "get_item", lambda self, index: original(self, index))
    dataset = demos.make(folder, "low_dim")
    assert not sequences.is_known(dataset)
    assert not sequences.is_known([1, 2])
    with pytest.raises(sequences.Unproven, match="the code of SequenceDataset is not one that is known here"):
        sequences.plan(dataset)
    monkeypatch.undo()
    dataset.get_item = lambda index: {}
    assert not sequences.is_known(dataset)


def test_a_dataset_that_changes_is_fetched_as_it_is(folder: Path) -> None:
    dataset, other = demos.make(folder, "low_dim", seq_length=3), demos.make(folder, "low_dim", seq_length=4)
    assert sequences.attach(dataset) is None
    dataset.seq_length = 4
    assert demos.is_same_batch(dataset, other)
    with pytest.raises(KeyError):
        demos.fetch(dataset, [0, len(other)])


@pytest.mark.parametrize("cache_mode", ["all", "low_dim", None])
def test_the_data_are_held_once_in_flat_arrays(folder: Path, cache_mode: Any) -> None:
    dataset, other = (demos.make(folder, cache_mode, obs_keys=(*demos.LOW_DIM, demos.IMAGE)) for _ in range(2))
    assert sequences.attach(dataset) is None
    assert sequences.attach(dataset) is None, "a second loader on it"
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


def _loader(folder: Path, cache_mode: Any, **settings: Any) -> Any:
    dataset = demos.make(folder, cache_mode, seq_length=3)
    settings = {"batch_size": 4, "sampler": Orders(len(dataset)), **settings}
    return make_loader(dataset, world=HERE, **settings)


def _passes(loader: Any, num_steps: list[int]) -> list[Any]:
    """The batches of as many passes, each left after so many of them."""
    return [[batch for _, batch in zip(range(num), loader)] for num in num_steps]


def _is_same_passes(found: list[Any], expected: list[Any]) -> bool:
    return [len(a) for a in found] == [len(b) for b in expected] and all(
        sequences._is_same(a, b) for one, other in zip(found, expected) for a, b in zip(one, other)
    )


@pytest.mark.parametrize("cache_mode", ["all", None])
def test_passes_that_are_abandoned_leave_nothing_to_the_next(folder: Path, cache_mode: Any) -> None:
    lengths = [3, 1, 8, 2, 8]
    with pytest.MonkeyPatch.context() as by_sample:
        by_sample.setattr(adapters, "fetcher_of", lambda dataset: None)
        reference = _loader(folder, cache_mode)
    assert reference.collate_fn is default_collate
    *expected, after = _passes(reference, [*lengths, 8])
    assert _is_same_passes(_passes(_loader(folder, cache_mode), lengths), expected)
    loader = _loader(folder, cache_mode, num_workers=2, persistent_workers=True, prefetch_factor=3)
    assert _is_same_passes(_passes(loader, lengths), expected)
    workers = loader._iterator._workers
    assert all(worker.is_alive() for worker in workers)
    assert _is_same_passes(_passes(loader, [8]), [after])
    assert loader._iterator._workers is workers


def _rows(folder: str, num_workers: int) -> tuple[list[Any], bool]:
    """All numbers of two passes in a program that every rank runs whole; whether they are fetched by the batch."""
    ddpshim.cleanup()
    ddpshim.setup(batch="global", seed=1, device="cpu")
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a rank may have workers
    demos.begin()
    dataset = demos.make(Path(folder), "low_dim", seq_length=3)
    how: Any = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    torch.manual_seed(4)
    loader = DataLoader(dataset, 7, shuffle=True, **how)
    found = [[(key, x.tolist()) for key, x in node_cache._leaves(batch).items()] for _ in range(2) for batch in loader]
    return found, "__getitems__" in vars(dataset)


def test_ranks_with_row_tensors_fetch_their_rows_by_the_batch(folder: Path) -> None:
    demos.make(folder, "low_dim", seq_length=3)  # the file, before ranks look for it
    [(expected, _)] = run_ranks(_rows, 1, str(folder), 0)
    for found, by_batch in run_ranks(_rows, 3, str(folder), 2):
        assert found == expected
        assert by_batch


def test_what_robomimics_loaders_are_made_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(datasets, "make_loader", lambda **options: made.append(options))
    monkeypatch.setattr(datasets, "world_of_shares", lambda: HERE)
    known, unknown = demos.make(folder, None), demos.make(folder, None, _subclass(get_item=lambda self, index: {}))
    for dataset, options in (
        (known, {"num_workers": 2}),
        (known, {"num_workers": 0}),
        (known, {"num_workers": 2, "worker_init_fn": print}),
        (known, {"num_workers": 2, "collate_fn": default_collate}),
        (known, {"num_workers": 2, "collate_fn": list}),
        (unknown, {"num_workers": 2}),
    ):
        datasets.loader(dataset=dataset, batch_size=4, **options)
    assert [options["persistent_workers"] for options in made] == [True, False, False, True, False, False]
    assert not any(options["pin_memory"] for options in made)
    monkeypatch.setattr(datasets, "world_of_shares", lambda: replace(HERE, device=torch.device("cuda", 0)))
    datasets.loader(dataset=known, batch_size=4)
    assert made[-1]["pin_memory"] is True
    many = replace(HERE, world_size=len(known) + 1)
    monkeypatch.setattr(datasets, "world_of_shares", lambda: many)
    with pytest.raises(ddpshim.DataError, match="Name a filter key with more demonstrations, or, if this is the "):
        datasets.loader(dataset=known, batch_size=many.world_size, drop_last=True)


def test_who_collates_himself_gets_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def collated(samples: list[Any]) -> Any:
        seen.append(samples)
        return default_collate(samples)

    loader = _loader(folder, "low_dim", collate_fn=collated)
    assert _is_same_passes(_passes(loader, [2]), _passes(_loader(folder, "low_dim"), [2]))
    assert {type(samples) for samples in seen} == {list}
    assert not hasattr(loader.dataset, "__getitems__")
    say.say_once.cache_clear()
    unknown = demos.make(folder, "low_dim", _subclass(get_item=lambda self, index: {"at": index}))
    batch = next(iter(make_loader(unknown, 4, world=HERE)))
    assert batch["at"].tolist() == [0, 1, 2, 3]
    said = "ddpshim: OwnDataset is read sample by sample, many times slower than by the batch: the code of OwnDataset"
    assert said in capsys.readouterr().err
