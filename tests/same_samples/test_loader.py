"""make_loader: W ranks side by side in one process, compared with a world of one."""

import multiprocessing
import random
import re

import numpy as np
import pytest
import torch
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.shares.loader_builder import scale_lr
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import ddpshim
from ddpshim.errors import DataError
from ddpshim.job.world import World
from ddpshim.options import Options
from ddpshim.process import say
from ddpshim.rows.samples import without_lists
from ddpshim.shares.loader import make_loader
from tests.ranks import own_rows, run_ranks


class Side:
    """A rank that shares its process with the others: the main rank acts first, the others read its post."""

    launcher, is_launched, options, device, local_world_size = "torchrun", True, Options(), torch.device("cpu"), 1

    def __init__(self, rank, world_size, seed, post):
        self.rank, self.world_size, self.seed, self.is_main = rank, world_size, seed, rank == 0
        self._post, self._num_read = post, 0

    def gather(self, value):
        return [value] * self.world_size

    def run_on_main(self, function, *args):
        if self.is_main:
            self._post.append(function(*args))
        self._num_read += 1
        return self._post[self._num_read - 1]

    def answers_of_main(self, name, value):
        return self.run_on_main(lambda: value)

    def broadcast(self, value):
        return self.run_on_main(lambda: value)


def side_by_side(world_size, seed=0):
    post = []
    return [Side(rank, world_size, seed, post) for rank in range(world_size)]


UNLAUNCHED = World(seed=0)


def make_loaders(world_size, make_dataset, *args, world_seed=0, make=None, **kwargs):
    worlds = side_by_side(world_size, world_seed)
    made = make() if make else {}
    return [make_loader(make_dataset(), *args, world=world, **made, **kwargs) for world in worlds]


def epoch_of(loaders, limit=None):
    """The global batches of one pass, put together from all ranks."""
    passes = []
    for one in loaders:
        steps = []
        for step, batch in enumerate(one):
            if step == limit:
                break
            steps.append(batch.tolist())
        passes.append(steps)
    assert len({len(steps) for steps in passes}) == 1
    together = []
    for shares in zip(*passes):
        assert len({len(share) for share in shares}) == 1
        together.append([sample for share in shares for sample in share])
    return together


class Numbers(IterableDataset):
    """0, 1, 2, ..., of which each worker gives its share."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.length) if info is None else range(info.id, self.length, info.num_workers))


class SizedNumbers(Numbers):
    def __len__(self):
        return self.length


def numbers():
    return torch.arange(96)


def test_without_a_launcher_arguments_go_where_torch_has_them():
    def collate(items):
        return len(items)

    def init(worker):
        del worker

    data = list(range(10))
    arguments = [data, 3, None, [5, 4, 3, 2], None, 0, collate, False, False, 0, init, None, None]
    ours = make_loader(*arguments, world=UNLAUNCHED)
    assert list(ours) == [3, 1]
    assert ours.worker_init_fn is init
    assert [len(make_loader(data, 3, drop_last=drops, world=UNLAUNCHED)) for drops in (None, False, True)] == [4, 4, 3]
    batches = make_loader(data, batch_sampler=[[0, 1], [2]], collate_fn=collate, world=UNLAUNCHED)
    assert list(batches) == [2, 1]
    assert list(make_loader(data, batch_size=None, world=UNLAUNCHED)) == data
    assert type(make_loader(data)) is type(ours) is DataLoader
    with pytest.raises(TypeError, match="no_such_thing"):
        make_loader(data, no_such_thing=1, world=UNLAUNCHED)
    with pytest.raises(TypeError, match="no_such_thing"):
        make_loader(data, no_such_thing=1, world=side_by_side(1)[0])


SOURCES = {
    "sequential": dict,
    "shuffled": lambda: {"shuffle": True},
    "random": lambda: {"sampler": RandomSampler(range(96))},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(5, 85))},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 48 + [3.0] * 48, 96)},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(96)), 8, True)},
}


@pytest.mark.ranks
@pytest.mark.parametrize(("source", "num_workers"), [*((source, 0) for source in SOURCES), ("weighted", 2)])
def test_global_batches_are_those_of_torchs_loader(source, num_workers):
    options = {"num_workers": num_workers, **({} if source == "batches" else {"batch_size": 8})}
    torch.manual_seed(7)
    plain = [DataLoader(numbers(), **SOURCES[source](), **options)]
    expected = [epoch_of(plain), epoch_of(plain, limit=3), epoch_of(plain)], torch.get_rng_state().tolist()
    for world_size in (1, 2, 4) if num_workers == 0 else (2,):
        torch.manual_seed(7)
        loaders = make_loaders(world_size, numbers, make=SOURCES[source], **options)
        assert [one.global_batch_size for one in loaders] == [8] * world_size
        run = [epoch_of(loaders), epoch_of(loaders, limit=3), epoch_of(loaders)]
        assert (run, torch.get_rng_state().tolist()) == expected
        assert [one.epoch for one in loaders] == [2] * world_size
        assert {len(one) for one in loaders} == {len(run[0])}
    first, abandoned, last = expected[0]
    if source != "sequential":
        assert first[:3] != abandoned != last[:3]
        assert first != last
    if source != "weighted":
        seen = [index for batch in first for index in batch]
        assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(("size", "num_samples"), [(10, None), (10, 3), (10, 20), (10, 25), (1, None), (70_000, None)])
def test_a_permutation_is_torchs(size, num_samples, is_given):
    runs = []
    for change in (lambda sampler: sampler, without_lists):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4) if is_given else None
        sampler = RandomSampler(range(size), num_samples=num_samples, generator=generator)
        passes = [list(change(BatchSampler(sampler, 4, drop_last))) for drop_last in (False, True, False)]
        after = [one.get_state().tolist() for one in (torch.default_generator, generator) if one is not None]
        runs.append((passes, list(change(sampler)), after))
    assert runs[0] == runs[1]
    assert runs[0][0][0] != runs[0][0][2] or size == 1


def test_two_passes_side_by_side_are_two_of_torchs():
    seen = []
    for make in (lambda: make_loaders(1, numbers, 8, shuffle=True)[0], lambda: DataLoader(numbers(), 8, shuffle=True)):
        torch.manual_seed(3)
        loader = make()
        seen.append([(a.tolist(), b.tolist()) for a, b in zip(loader, loader)])
    assert seen[0] == seen[1]
    assert all(a != b for a, b in seen[0])


def test_with_drop_last_false_ranks_share_the_rows_that_are_left():
    for world_size in (1, 2, 4):
        loaders = make_loaders(world_size, lambda: torch.arange(20), 8, drop_last=False)
        rows = [own_rows([16, 17, 18, 19], r, world_size) for r in range(world_size)]
        assert [list(one)[-1].tolist() for one in loaders] == rows
        assert [len(one) for one in loaders] == [3] * world_size


def test_a_batch_of_a_batch_sampler_that_ranks_do_not_divide_names_the_other_door():
    with pytest.raises(DataError, match=r"The dataset .* has no __len__"):
        make_loaders(2, object, 4)
    for loader in make_loaders(2, numbers, batch_sampler=[[0, 1], [2, 3, 4]]):
        with pytest.raises(DataError, match=r"has 3 indices, which 2 ranks do not divide.* setup\(batch=\"global\"\)"):
            list(loader)
    for loader in make_loaders(3, numbers, 8, drop_last=False, already_sharded=True, per_rank_batch=True):
        assert len(list(loader)) == 12


def test_on_ranks_what_is_left_out_by_default_is_said(capsys):
    for drop_last, num_samples in ((None, 21), (None, 21), (True, 22), (None, 24)):
        loaders = make_loaders(2, lambda num=num_samples: torch.arange(num), 8, drop_last=drop_last)
        assert [(len(one), one.drop_last) for one in loaders] == [(num_samples // 8, True)] * 2
    lines = [line for line in capsys.readouterr().err.splitlines() if " drops " in line]
    assert len(lines) == 1
    assert re.search(r"test_loader\.py:\d+ drops 5 of 21 samples in each epoch", lines[0])
    assert lines[0].endswith("drop_last=False trains on all of them, as one process does")


def test_what_is_empty_is_empty_on_any_number_of_ranks():
    worlds = [*side_by_side(1), *side_by_side(2), World(launcher="torchrun", seed=0)]
    loaders = [make_loader([], 6, world=one) for one in worlds]
    assert [(len(one), list(one)) for one in loaders] == [(0, [])] * 4


def test_a_loader_reads_as_torchs_does():
    first, loader = make_loaders(2, numbers, 8, shuffle=True)
    assert isinstance(loader, ShardedLoader)
    assert (loader.batch_size, loader.global_batch_size, loader.drop_last) == (4, 8, True)
    [_, per_rank] = make_loaders(2, numbers, 8, per_rank_batch=True)
    assert (per_rank.batch_size, per_rank.global_batch_size, len(per_rank)) == (8, 16, 6)
    for epoch, named in enumerate((loader, loader.sampler, loader.batch_sampler), 5):
        named.set_epoch(epoch)
        assert (loader.epoch, len(named)) == (epoch, 12)
    for one in (first, first, loader, loader):
        list(one)
    assert loader.epoch == 8


class Windows:
    def __len__(self):
        return 16

    def __getitems__(self, indices):
        return [{"obs": torch.full((3,), float(i)), "index": i} for i in indices]


@pytest.mark.ranks
def test_dicts_are_collated_batched_fetches_are_used_and_ready_batches_are_given_as_they_are():
    _, batch = [next(iter(loader)) for loader in make_loaders(2, Windows, 8)]
    assert batch["index"].tolist() == [4, 5, 6, 7]
    assert batch["obs"].shape == (4, 3)
    [loader] = make_loaders(1, lambda: [[0, 1], [2], [3, 4, 5]], None, shuffle=True, collate_fn=list)
    assert sorted(loader) == sorted(loader) == [[0, 1], [2], [3, 4, 5]]
    assert (len(loader), loader.global_batch_size) == (3, None)
    assert sorted(make_loaders(1, lambda: Numbers(6), None, num_workers=2)[0]) == list(range(6))
    [_, loader] = make_loaders(2, lambda: Numbers(6), None, already_sharded=True)
    assert list(loader) == list(range(6))


class Noise:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64)


def noise_of(loader):
    return torch.cat(list(loader)).tolist()


def _rank_draws_in_workers():
    multiprocessing.current_process()._config["daemon"] = False  # a rank may have workers
    generator = torch.Generator().manual_seed(1)
    loader = make_loader(Noise(), 4, num_workers=2, multiprocessing_context="fork", generator=generator)
    return [noise_of(loader) for _ in range(2)]


@pytest.mark.ranks
def test_with_noise_per_rank_workers_are_seeded_by_rank_worker_and_epoch():
    drawn, again, other = (
        run_ranks(_rank_draws_in_workers, 2, environ={"DDPSHIM_NOISE": "per_rank"}, seed=seed) for seed in (0, 0, 1)
    )
    assert drawn == again
    values = [value for runs in (*drawn, *other) for run in runs for row in run for value in row]
    assert len(set(values)) == len(values) == 2 * 2 * 2 * 4 * 3


def test_a_stream_that_every_rank_would_read_whole_is_refused():
    with pytest.raises(DataError, match=r"Numbers is a stream.*already_sharded=True.*setup\(batch=\"global\"\)"):
        make_loaders(2, lambda: Numbers(30), 8)
    assert epoch_of(make_loaders(1, lambda: Numbers(30), 8))[-1] == [*range(16, 24)]


class Epochal(IterableDataset):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch * 100 + number for number in range(8)])


@pytest.mark.ranks
@pytest.mark.parametrize("kwargs", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_a_stream_hears_of_its_epoch_also_in_workers_that_live_on(kwargs):
    [loader] = make_loaders(1, Epochal, 4, **kwargs)
    firsts = [epoch_of([loader])[0][0] for _ in range(2)]
    next(iter(loader))
    firsts.append(epoch_of([loader])[0][0])
    loader.set_epoch(9)
    firsts.append(epoch_of([loader])[0][0])
    assert firsts == [0, 100, 300, 900]


def test_length_of_a_stream_counts_steps():
    shared = {"already_sharded": True}
    [loader, _] = make_loaders(2, lambda: SizedNumbers(15), 8, **shared)
    assert (len(loader), len(loader.dataset), loader.dataset.length) == (3, 15, 15)
    assert len(make_loaders(2, lambda: SizedNumbers(15), 8, drop_last=False, **shared)[0]) == 4
    [unsized] = make_loaders(1, lambda: Numbers(30), 8)
    with pytest.raises(TypeError, match="has no len"):
        len(unsized)


def test_already_sharded_divides_only_the_batch():
    streams = make_loaders(2, lambda: Numbers(8), 4, already_sharded=True)
    assert [[batch.tolist() for batch in one] for one in streams] == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2
    [first, second] = make_loaders(2, lambda: torch.arange(24), 4, shuffle=True, already_sharded=True)
    assert (len(first), first.batch_size, first.global_batch_size) == (12, 2, 4)
    orders = [torch.cat(list(one)).tolist() for one in (first, second)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(24))
    assert orders[0] != orders[1]
    sampler = DistributedSampler(range(24), 2, 1, shuffle=False)
    [_, own] = make_loaders(2, lambda: torch.arange(24), 4, sampler=sampler, already_sharded=True)
    assert torch.cat(list(own)).tolist() == list(range(1, 24, 2))


OTHER_DOOR = r".* setup\(batch=\"global\"\)"


@pytest.mark.parametrize(
    ("num_ranks", "num", "arguments", "text"),
    [
        (4, 97, {"batch_size": 10}, f"does not split over 4 ranks \\(2 left over\\): .* Use 8 or 12{OTHER_DOOR}"),
        (4, 97, {"batch_size": 3}, r"Global batch 3 is smaller than 4 ranks: .* use at most 3 ranks \(--nproc 3\)\."),
        (2, 97, {"batch_size": 128}, r"128 is larger than the 97 samples; .* Use at most 96 \(48 for each rank\)"),
        (4, 22, {"batch_size": 8, "drop_last": False}, f"leave 6 for the last batch, which 4 ranks do not{OTHER_DOOR}"),
        (4, 3, {"batch_size": 4, "drop_last": False}, "has 3 samples for 4 ranks; some would train on none"),
        (2, 0, {"batch_size": 4, "shuffle": True}, "is empty"),  # torch refuses it as well
        (4, 97, {"batch_size": 4, "sampler": [1, 2, 3]}, r"sampler .* has 3 samples for 4 ranks"),
        (2, 97, {"batch_size": 4, "sampler": iter([1])}, r"The sampler \(list_iterator\) has no __len__"),
        (2, 97, {"batch_sampler": []}, "batch_sampler has length 0"),
        (2, 97, {"batch_sampler": [[1, 2]], "per_rank_batch": True}, "per_rank_batch=True with a batch_sampler"),
        (2, 97, {"batch_size": 4, "num_workers": 2, "in_order": False}, "in_order=False"),
    ],
)
def test_what_does_not_split_is_refused(num_ranks, num, arguments, text):
    with pytest.raises(DataError, match=text):
        make_loaders(num_ranks, lambda: torch.arange(num), **arguments)


def test_a_sampler_that_is_a_share_already_is_refused():
    sharded = DistributedSampler(range(96), 2, 1)
    for kwargs in ({"batch_size": 8, "sampler": sharded}, {"batch_sampler": BatchSampler(sharded, 8, True)}):
        with pytest.raises(DataError, match=r"already takes one share of 2 \(rank 1\).* pass shuffle="):
            make_loaders(2, numbers, **kwargs)
    whole = DistributedSampler(range(96), 1, 0, shuffle=False)
    assert epoch_of(make_loaders(2, numbers, 8, sampler=whole))[0] == list(range(8))


def test_torchs_own_refusals_stay():
    for world in (UNLAUNCHED, side_by_side(2)[0]):
        with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
            make_loader(numbers(), 4, True, [1, 2, 3, 4], world=world)
        with pytest.raises(ValueError, match="batch_sampler option is mutually exclusive"):
            make_loader(numbers(), 4, batch_sampler=[[1, 2]], world=world)
        with pytest.raises(ValueError, match="expected unspecified shuffle option"):
            make_loader(Numbers(8), 4, True, world=world)
        with pytest.raises(ValueError, match="positive integer"):
            make_loader(numbers(), 0, world=world)
        with pytest.raises(ValueError, match="persistent_workers option needs num_workers"):
            make_loader(numbers(), 4, persistent_workers=True, world=world)


def test_the_global_batch_is_printed_once_by_the_main_rank(capsys):
    say.say_once.cache_clear()
    for _ in range(2):
        make_loaders(2, numbers, 8)
    make_loaders(1, numbers, 8)
    printed = capsys.readouterr()
    assert [line.split(" = ")[1] for line in printed.err.splitlines()] == ["2 ranks x 4", "1 rank x 8"]
    assert printed.out == ""


def test_learning_rate_rules():
    assert [scale_lr(0.5, rule, 4) for rule in ("linear", "sqrt", "none")] == [2.0, 1.0, 0.5]
    assert scale_lr(0.5) == 0.5
    with pytest.raises(DataError, match="rule='cubic' is not a learning-rate rule"):
        scale_lr(0.5, "cubic", 4)


class FailsLater:
    num_passes = 0

    def __len__(self):
        return 8

    def __iter__(self):
        self.num_passes += 1
        if self.num_passes > 1:
            raise KeyError("gone")
        return iter(np.random.RandomState().permutation(8).tolist())


class Broken:
    """On rank 1 it cannot be opened."""

    def __len__(self):
        if ddpshim.world().rank:
            raise OSError("no such file")
        return 8


def _on_two_ranks():
    rank = ddpshim.world().rank
    loader = make_loader(torch.arange(8), 4, sampler=FailsLater())
    seen = [batch.tolist() for batch in loader]
    attempts = [
        lambda: next(iter(loader)),
        lambda: make_loader(torch.arange(8 + rank), 4),
        lambda: make_loader(torch.arange(8), 4 + 4 * rank),
        lambda: make_loader(Broken(), 4),
    ]
    errors = []
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return seen, errors


@pytest.mark.ranks
def test_one_draw_and_one_failure_on_two_processes():
    (seen0, errors0), (seen1, errors1) = run_ranks(_on_two_ranks, 2)
    assert sorted(index for batch in seen0 + seen1 for index in batch) == list(range(8))
    assert errors0[0] == "KeyError: 'gone'"
    assert errors1[0].startswith("WorldError")
    assert "KeyError: 'gone'" in errors1[0]
    assert errors0[1:3] == errors1[1:3]
    assert "Ranks disagree on the number of samples: 8 on rank 0, 9 on rank 1" in errors0[1]
    assert "Ranks disagree on the number of steps: 2 on rank 0, 1 on rank 1" in errors0[2]
    assert "WorldError: rank 1 could not make its loader (OSError: no such file" in errors0[3]
    assert errors1[3] == "OSError: no such file"
