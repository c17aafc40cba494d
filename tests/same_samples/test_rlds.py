"""DROID's data through octo's own pipeline, on two ranks: see tests/rlds.py, which prints what is asserted here."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.data import IterableDataset

import ddpshim
from ddpshim import DataError, World
from ddpshim.robomimic import droid
from tests import rlds as pipeline
from tests.ranks import errors_of, run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    lacking = pipeline.missing()
    if lacking is not None:
        pytest.skip(f"needs {lacking}")
    folder = str(tmp_path_factory.mktemp("rlds"))
    pipeline.build(folder)
    return folder


def frames_of(reading, name):
    return sum(count for (dataset, _), count in reading.episodes.items() if dataset == name)


@pytest.mark.launch
@pytest.mark.upstream
def test_each_rank_reads_its_own_trajectories_of_one_mixture(folder):
    ranks = pipeline.readings("ddpshim", 2, folder, num_frames=1500, shuffle_buffer_size=40)
    seen = [set(reading.episodes) for reading in ranks]
    # 95% of 51 and of 20
    assert [len({e for e in episodes if e[0] == "droid"}) for episodes in seen] == [24, 24]
    assert sorted(len({e for e in episodes if e[0] == "lab"}) for episodes in seen) == [9, 10]
    assert seen[0].isdisjoint(seen[1])
    for reading in ranks:
        assert frames_of(reading, "droid") / 1500 == pytest.approx(0.7, abs=0.06)  # five standard deviations
    assert ranks[0].order[:40] != ranks[1].order[:40]
    # The main rank alone goes over the data, and all have its numbers to the last digit.
    assert [reading.num_statistics > 0 for reading in ranks] == [True, False]
    assert repr(ranks[0].statistics) == repr(ranks[1].statistics)
    assert len(list(Path(folder).glob("*/*/dataset_statistics_*.json"))) == 2


class Rank(World):
    """One of several ranks, alone in its process: the others do as it does."""

    def gather(self, value):
        return [value] * self.world_size

    def broadcast(self, value, src=0):
        return value

    def run_on_main(self, function, *args):
        return function(*args)


@pytest.fixture
def octo(monkeypatch):
    """Stand-ins for tensorflow, dlimp and octo that write down what they are asked for."""
    asked = SimpleNamespace(seeds=[], splits=[], mixtures=[])

    def made_options(ram_budget=None):
        return SimpleNamespace(autotune=SimpleNamespace(ram_budget=ram_budget))

    class Dataset:
        def options(self):
            return made_options(1000)

        def with_options(self, options):
            asked.ram_budget = options.autotune.ram_budget
            return Dataset()

    class DLataset:
        @staticmethod
        def from_rlds(builder, split, shuffle=True):
            asked.splits.append(split)

        @staticmethod
        def sample_from_datasets(datasets, weights, stop_on_empty_dataset=False):
            asked.stops_on_empty_dataset = stop_on_empty_dataset

    def make_dataset_from_rlds(name, data_dir, *, train, dataset_statistics=None):
        if dataset_statistics is None:
            DLataset.from_rlds(tfds.builder(name, data_dir), split="all", shuffle=False)
            dataset_statistics = {"num_transitions": 1000}
        DLataset.from_rlds(tfds.builder(name, data_dir), split="train[:95%]")
        return Dataset(), dataset_statistics

    def make_interleaved_dataset(kwargs_list, weights, **options):
        asked.mixtures.append(options)
        made = [module.make_dataset_from_rlds(**kwargs, train=True) for kwargs in kwargs_list]
        DLataset.sample_from_datasets([dataset for dataset, _ in made], weights)
        mixed = Dataset()
        mixed.dataset_statistics, mixed.sample_weights = [statistics for _, statistics in made], weights
        return mixed

    info = SimpleNamespace(splits={"train[:95%]": SimpleNamespace(num_examples=95)}, full_name="droid/1.0.0")
    tfds = SimpleNamespace(
        builder=lambda name, data_dir: SimpleNamespace(info=info),
        even_splits=lambda split, n, drop_remainder: [f"{rank} of {n} of {split}" for rank in range(n)],
    )
    functions = {"make_dataset_from_rlds": make_dataset_from_rlds, "make_interleaved_dataset": make_interleaved_dataset}
    module, random = SimpleNamespace(**functions), SimpleNamespace(set_seed=asked.seeds.append)
    stand_ins = {
        "tensorflow": SimpleNamespace(data=SimpleNamespace(AUTOTUNE=-1, Options=made_options), random=random),
        "tensorflow_datasets": tfds,
        "dlimp": SimpleNamespace(DLataset=DLataset),
        "octo": SimpleNamespace(),
        "octo.data": SimpleNamespace(dataset=module),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    originals = {name: vars(DLataset)[name] for name in ("from_rlds", "sample_from_datasets")}
    yield asked
    # Everything is octo's and dlimp's own again.
    assert vars(module) == functions
    assert {name: vars(DLataset)[name] for name in originals} == originals


OPTIONS = {
    "shuffle_buffer_size": 1001,
    "traj_transform_threads": 3,
    "traj_read_threads": 48,
    "frame_transform_kwargs": {"num_parallel_calls": 200, "resize_size": {}},
}


def mix(monkeypatch, world, **options):
    monkeypatch.setattr(droid, "world", lambda: world)
    kwargs = [{"name": f"droid_{i}", "data_dir": "/data"} for i in range(2)]
    return droid.make_interleaved_dataset(kwargs, [0.5, 0.5], train=True, **{**OPTIONS, **options})


def test_a_rank_gets_its_part_of_everything(monkeypatch, octo):
    monkeypatch.setattr("secrets.randbits", lambda num_bits: 5)  # the main rank draws for all
    ranks = [Rank(rank=r, world_size=8, local_world_size=4, launcher="torchrun", seed=1) for r in range(8)]
    for rank in ranks:
        mix(monkeypatch, rank)
    assert octo.mixtures[3] == {
        "train": True,
        "shuffle_buffer_size": 126,
        "traj_transform_threads": 2,  # octo wants one for each of two datasets
        "traj_read_threads": 12,
        "frame_transform_kwargs": {"num_parallel_calls": 50, "resize_size": {}},
    }
    assert octo.ram_budget == 250
    assert octo.stops_on_empty_dataset
    assert len(set(octo.seeds)) == 8
    with pytest.raises(DataError, match=r"batch_size=12.*give it to rlds_loader"):
        mix(monkeypatch, ranks[0], batch_size=12)


def test_statistics_are_of_everything_and_the_data_of_a_share(monkeypatch, octo):
    rank = Rank(rank=1, world_size=2, local_world_size=2, launcher="torchrun", seed=1)
    monkeypatch.setattr(droid, "world", lambda: rank)
    droid.make_dataset_from_rlds("droid", "/data", train=True)
    assert octo.splits == ["all", "train[:95%]", "1 of 2 of train[:95%]"]


def test_a_split_that_differs_or_is_too_small_is_refused(monkeypatch, octo):
    rank = Rank(rank=0, world_size=96, launcher="torchrun", seed=1)
    monkeypatch.setattr(droid, "world", lambda: rank)
    with pytest.raises(DataError, match=r"Split train\[:95%\] of droid/1.0.0 has 95 examples for 96 ranks"):
        droid.make_dataset_from_rlds("droid", "/data", train=True)
    monkeypatch.setattr(Rank, "gather", lambda self, facts: [facts, {**facts, "number of examples": 50}])
    with pytest.raises(DataError, match=r"Ranks have different splits .*95.*50"):
        droid.make_dataset_from_rlds("droid", "/data", train=True)


def test_without_a_launcher_octo_is_called_as_it_was(monkeypatch, octo):
    mix(monkeypatch, World())
    assert octo.mixtures == [{"train": True, **OPTIONS}]
    assert octo.splits == ["all", "train[:95%]"] * 2
    assert not octo.stops_on_empty_dataset
    assert octo.seeds == []


def read_to_the_end():
    ddpshim.cleanup()
    here = ddpshim.setup(batch="global", seed=1, device="cpu")
    batches = iter(droid.rlds_loader(Stream([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]][here.rank]), batch_size=4))
    assert [next(batches).tolist() for _ in range(2)] == [[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]
    next(batches)


@pytest.mark.ranks
def test_ranks_read_a_batch_together_and_the_end_of_a_mixture_is_an_error():
    alone = droid.rlds_loader(Stream([1.0, 2.0]), batch_size=2)
    assert [batch.tolist() for batch in alone] == [[1.0, 2.0]]
    for rank, (said,) in enumerate(run_ranks(errors_of, 2, [read_to_the_end])):
        assert f"DataError: The mixture ended on rank {rank}: " in said
        assert "Use fewer than 2 ranks" in said


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)
