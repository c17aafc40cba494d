"""make_loader: W ranks side by side in one process, compared with torch's DistributedSampler and with one order."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import ddpshim
from ddpshim.errors import DataError
from ddpshim.job.world import World
from ddpshim.options import Options
from ddpshim.process import say
from ddpshim.process.job import current
from ddpshim.shares.loader import make_loader, scale_lr
from tests.ranks import run_ranks

GLOBAL_DOOR = r".* setup\(batch=\"global\"\)"


class Side:
    """A rank that shares its process with the others: the main rank acts first, the others read its post."""

    launcher, is_launched, options, device, local_world_size = "torchrun", True, Options(), torch.device("cpu"), 1

    def __init__(self, rank: int, world_size: int, seed: int, post: list[Any]) -> None:
        self.rank, self.world_size, self.seed, self.is_main = rank, world_size, seed, rank == 0
        self._post, self._num_read = post, 0

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def run_on_main(self, function: Any, *args: Any) -> Any:
        if self.is_main:
            self._post.append(function(*args))
        self._num_read += 1
        return self._post[self._num_read - 1]


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    ddpshim.cleanup()
    yield
    current().world = None


def make_loaders(world_size: int, dataset: Any, *args: Any, seed: int = 0, **kwargs: Any) -> list[Any]:
    """Return the loaders of all ranks. A value that is a function without arguments is called for each rank."""
    made, post = [], list[Any]()
    for rank in range(world_size):
        current().world = Side(rank, world_size, seed, post)  # type: ignore[assignment]
        own = {name: value() if callable(value) else value for name, value in kwargs.items()}
        made.append(make_loader(dataset() if callable(dataset) else dataset, *args, **own))
    return made


def passes(loaders: list[Any]) -> list[list[list[Any]]]:
    """Return one pass of each rank: its batches as lists."""
    return [[batch.tolist() for batch in loader] for loader in loaders]


def together(loaders: list[Any]) -> list[list[int]]:
    """Return the samples of each global batch of one pass, sorted."""
    of_ranks = passes(loaders)
    assert len({len(batches) for batches in of_ranks}) == 1
    assert all(len({len(share) for share in shares}) == 1 for shares in zip(*of_ranks))
    return [sorted(sample for share in shares for sample in share) for shares in zip(*of_ranks)]


class Numbers(IterableDataset[int]):
    """0, 1, 2, ..., of which each worker gives its share."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.length) if info is None else range(info.id, self.length, info.num_workers))


@pytest.mark.ranks
def test_without_a_launcher_it_is_torchs_loader_with_its_arguments_in_its_order() -> None:
    names = list(inspect.signature(DataLoader.__init__).parameters)[1:]
    ours = list(inspect.signature(make_loader).parameters)
    assert ours[:13] == names[:13]
    assert {*names} <= {*ours} - {"per_rank_batch", "already_sharded"}
    data = list(range(10))
    found = make_loader(data, 3, None, [5, 4, 3, 2], None, 0, len, False, False, 0, print, None, None)  # type: ignore[arg-type]
    assert (type(found), list(found), found.worker_init_fn) == (DataLoader, [3, 1], print)
    assert [len(make_loader(data, 3, drop_last=drops)) for drops in (None, False, True)] == [4, 4, 3]
    torch.manual_seed(3)
    expected = passes([DataLoader(torch.arange(10), 3, shuffle=True, num_workers=2)])  # type: ignore[arg-type]
    torch.manual_seed(3)
    assert passes([make_loader(torch.arange(10), 3, shuffle=True, num_workers=2)]) == expected
    with pytest.raises(TypeError, match="no_such_thing"):
        make_loader(data, no_such_thing=1)  # type: ignore[call-arg]


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize(("world_size", "num"), [(1, 97), (2, 97), (3, 96)])
def test_ranks_see_what_distributed_sampler_gives_them(world_size: int, num: int, options: dict[str, Any]) -> None:
    for shuffle in (False, True):
        loaders = make_loaders(world_size, torch.arange(num), 12, shuffle, seed=5, **options)
        for epoch in range(3):
            expected = []
            for rank in range(world_size):
                sampler = DistributedSampler(range(num), world_size, rank, shuffle, seed=5, drop_last=True)  # type: ignore[arg-type]
                sampler.set_epoch(epoch)
                data: Any = torch.arange(num)
                expected += passes([DataLoader(data, 12 // world_size, sampler=sampler, drop_last=True)])
            assert passes(loaders) == expected
            assert len({sample for batches in expected for batch in batches for sample in batch}) == 96


ORDERS: dict[str, Any] = {
    "subset": {"sampler": lambda: SubsetRandomSampler(range(5, 85))},
    "weighted": {"sampler": lambda: WeightedRandomSampler([1.0] * 48 + [3.0] * 48, 96)},
    "given": {"shuffle": True, "generator": lambda: torch.Generator().manual_seed(7)},
    "batches": {"batch_size": 1, "batch_sampler": lambda: BatchSampler(RandomSampler(range(96)), 8, True)},
}


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_of_the_callers_is_drawn_once_for_all_and_leaves_random_streams_alone(order: str) -> None:
    options = {"batch_size": 8, **ORDERS[order]}
    before = torch.get_rng_state().tolist()
    of_sizes = []
    for world_size in (1, 2, 4):
        loaders = make_loaders(world_size, torch.arange(96), **options)
        assert [(len(one), one.global_batch_size) for one in loaders] == [(len(loaders[0]), 8)] * world_size
        of_sizes.append([together(loaders) for _ in range(2)])
    assert torch.get_rng_state().tolist() == before
    assert of_sizes[0] == of_sizes[1] == of_sizes[2]
    first, second = of_sizes[0]
    assert first != second
    seen = [sample for batch in first for sample in batch]
    assert len({*seen}) == len(seen) or order == "weighted"
    assert order != "weighted" or sum(sample >= 48 for sample in seen) > 60  # 72 of 96 are expected


def test_two_passes_side_by_side_are_two_epochs() -> None:
    [loader] = make_loaders(1, torch.arange(96), 8, True)
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader)]
    loader.set_epoch(0)
    assert [[*batches] for batches in zip(*pairs)] == [*passes([loader]), *passes([loader])]


WORKERS = {"shuffle": True, "num_workers": 2, "persistent_workers": True}


@pytest.mark.ranks
@pytest.mark.parametrize("given", [{"shuffle": True}, WORKERS, ORDERS["weighted"], ORDERS["given"], ORDERS["batches"]])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_pass_is_entered_in_the_middle_on_any_number_of_ranks(given: dict[str, Any], after: int) -> None:
    options = {"batch_size": 8, **given}
    loaders = make_loaders(2, torch.arange(96), **options)
    whole = [together(loaders) for _ in range(3)]
    again = make_loaders(2, torch.arange(96), **options)
    together(again)
    iterators = [iter(loader) for loader in again]
    assert sorted(sample for one in iterators for sample in next(one).tolist()) == whole[1][0]
    entered = make_loaders(after, torch.arange(96), **options)
    for rank, loader in enumerate(entered):
        loader.enter(1, 5, again[rank].order_state() if rank < 2 else None, is_inside=True)
    assert [together(entered) for _ in range(2)] == [whole[1][5:], whole[2]]


def test_with_drop_last_false_ranks_share_what_is_left_if_they_divide_it() -> None:
    loaders = make_loaders(2, torch.arange(20), 8, drop_last=False)
    assert passes(loaders) == [[[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]], [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19]]]
    with pytest.raises(
        DataError, match=rf"20 samples leave 5 .*which 3 ranks.*already_sharded.*mean_over{GLOBAL_DOOR}"
    ):
        make_loaders(3, torch.arange(20), 15, drop_last=False)


def test_evaluation_counts_each_sample_once_as_the_error_says() -> None:
    seen = []
    for rank in range(3):
        current().world = Side(rank, 3, 0, [])  # type: ignore[assignment]
        part: Any = Subset(range(20), range(rank, 20, 3))  # type: ignore[arg-type]
        seen += [i for batch in make_loader(part, 6, already_sharded=True, drop_last=False) for i in batch.tolist()]
    assert sorted(seen) == [*range(20)]


def test_a_loader_reads_as_torchs_does(capsys: pytest.CaptureFixture[str]) -> None:
    say.say_once.cache_clear()
    for _ in range(2):
        loader = make_loaders(2, torch.arange(97), 8, True)[1]
    assert (loader.batch_size, loader.global_batch_size, loader.drop_last, len(loader)) == (4, 8, True, 12)
    line = "ddpshim: global batch 8 = 2 ranks x 4; an epoch leaves out 1 of 97 samples\n"
    assert capsys.readouterr() == ("", line)
    [_, per_rank] = make_loaders(2, torch.arange(96), 8, per_rank_batch=True)
    assert (per_rank.batch_size, per_rank.global_batch_size, len(per_rank)) == (8, 16, 6)
    whole = passes([loader])
    passes([loader])
    loader.sampler.set_epoch(0)  # as programs for DistributedSampler do
    assert passes([loader]) == whole


class Windows(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"obs": torch.full((3,), float(i)), "index": i} for i in indices]


def test_dicts_are_collated_and_batched_fetches_are_used() -> None:
    _, batch = [next(iter(loader)) for loader in make_loaders(2, Windows(), 8, pin_memory=False)]
    assert batch["index"].tolist() == [1, 3, 5, 7]
    assert batch["obs"].shape == (4, 3)


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64)


@pytest.mark.ranks
def test_workers_are_seeded_by_seed_rank_worker_and_epoch() -> None:
    def drawn(seed: int) -> list[Any]:
        loaders = make_loaders(2, Noise(), 4, num_workers=2, seed=seed)
        return [torch.cat(list(loader)).tolist() for loader in loaders for _ in range(2)]

    before = torch.get_rng_state().tolist()
    found, other = drawn(0), drawn(1)
    assert drawn(0) == found
    values = [value for one in (*found, *other) for row in one for value in row]
    assert len(set(values)) == len(values) == 2 * 2 * 2 * 4 * 3
    assert torch.get_rng_state().tolist() == before


def test_already_sharded_divides_only_the_batch() -> None:
    streams = make_loaders(2, Numbers(8), 4, already_sharded=True)
    assert passes(streams) == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2
    ready = make_loaders(2, Numbers(6), None, already_sharded=True)
    assert [list(one) for one in ready] == [[*range(6)]] * 2
    first, second = passes(make_loaders(2, torch.arange(24), 4, True, already_sharded=True))
    assert sorted(i for batch in first for i in batch) == sorted(i for batch in second for i in batch) == [*range(24)]
    assert first != second
    sampler: Any = DistributedSampler(range(24), 2, 1, shuffle=False)  # type: ignore[arg-type]
    [_, own] = make_loaders(2, torch.arange(24), 4, sampler=sampler, already_sharded=True)
    assert torch.cat(list(own)).tolist() == [*range(1, 24, 2)]


SHARDED = DistributedSampler(range(96), 2, 1)  # type: ignore[arg-type]
IN_ROWS: list[Any] = [  # refused with the call that has no such limit
    (4, 97, {"batch_size": 10}, r"batch 10 does not split over 4 ranks \(2 left over\).* multiple of 4"),
    (4, 97, {"batch_size": 3}, "batch 3 does not split over 4 ranks"),
    (2, 97, {"batch_size": 128}, "97 samples leave 97 for the last batch of 128"),
    (2, Windows, {"batch_size": None}, "Windows is a stream, or gives ready batches.*already_sharded"),
    (2, lambda: Numbers(30), {"batch_size": 8}, "Numbers is a stream.*already_sharded=True"),
]


@pytest.mark.parametrize(
    ("num_ranks", "data", "arguments", "text"),
    [
        *((*case, text + GLOBAL_DOOR) for *case, text in IN_ROWS),
        (2, 0, {"batch_size": 4}, "0 samples leave 0 .* or there is none"),
        (4, 97, {"batch_size": 4, "sampler": [1, 2, 3]}, "3 samples leave 3 for the last batch of 4"),
        (2, 97, {"batch_size": 4, "sampler": iter([1])}, r"has no __len__"),
        (2, 97, {"batch_sampler": [[1, 2]], "per_rank_batch": True}, "per_rank_batch=True with a batch_sampler"),
        (2, 97, {"batch_size": 8, "sampler": SHARDED}, "DistributedSampler shards already.*pass shuffle="),
        (2, 97, {"batch_sampler": BatchSampler(SHARDED, 8, True)}, "DistributedSampler shards already"),
    ],
)
def test_what_ranks_cannot_share_is_refused(num_ranks: int, data: Any, arguments: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        make_loaders(num_ranks, data if callable(data) else torch.arange(data), **arguments)


def test_a_batch_of_a_batch_sampler_that_ranks_do_not_divide_is_refused_when_it_comes() -> None:
    for loader in make_loaders(2, torch.arange(9), batch_sampler=[[0, 1], [2, 3, 4]]):
        with pytest.raises(DataError, match=f"a batch of 3 samples does not split over 2 ranks{GLOBAL_DOOR}"):
            list(loader)


def test_torchs_own_refusals_stay() -> None:
    for world in (World(), World(launcher="torchrun"), Side(0, 2, 0, [])):
        current().world = world  # type: ignore[assignment]
        data = torch.arange(96)
        with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
            make_loader(data, 4, True, [1, 2, 3, 4])
        with pytest.raises(ValueError, match="batch_sampler option is mutually exclusive"):
            make_loader(data, 4, batch_sampler=[[1, 2]])
        with pytest.raises(ValueError, match="positive integer"):
            make_loader(data, 0)
        with pytest.raises(ValueError, match="persistent_workers option needs num_workers"):
            make_loader(data, 4, persistent_workers=True)


def test_learning_rate_rules() -> None:
    assert [scale_lr(0.5, rule, 4) for rule in ("linear", "sqrt", "none")] == [2.0, 1.0, 0.5]
    assert scale_lr(0.5) == 0.5
    with pytest.raises(DataError, match="rule='cubic' is not a learning-rate rule"):
        scale_lr(0.5, "cubic", 4)


class FailsLater:
    num_passes = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        if self.num_passes > 1:
            raise KeyError("gone")
        return iter(np.random.RandomState().permutation(8).tolist())


def _on_two_ranks() -> Any:
    rank = ddpshim.world().rank
    data: Any = torch.arange(8)
    loader = make_loader(data, 4, sampler=FailsLater())
    seen = [batch.tolist() for batch in loader]
    attempts = [
        lambda: next(iter(loader)),
        lambda: make_loader(torch.arange(8 + rank), 4),
        lambda: make_loader(data, 4 + 4 * rank),
        lambda: make_loader(Subset(data, [*range(rank, 4 + rank)]), 4),
    ]
    errors = []
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return seen, errors


@pytest.mark.ranks
def test_one_draw_and_one_failure_on_two_processes() -> None:
    (seen0, errors0), (seen1, errors1) = run_ranks(_on_two_ranks, 2)
    assert sorted(index for batch in seen0 + seen1 for index in batch) == [*range(8)]
    assert errors0[0] == "KeyError: 'gone'"
    assert errors1[0].startswith("WorldError")
    assert "KeyError: 'gone'" in errors1[0]
    assert errors0[1:] == errors1[1:]
    assert "are (8, 2, 4, []) on rank 0 and (9, 2, 4, []) on rank 1: samples would be" in errors0[1]
    assert "are (8, 2, 4, []) on rank 0 and (8, 1, 8, []) on rank 1" in errors0[2]
    assert "hash of the indices of a Subset" in errors0[3]
