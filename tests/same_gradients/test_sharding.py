"""shard_iterable: who reads which item, over ranks, data workers and passes."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ddpshim import DataError, World, make_loader, shard_iterable
from tests.same_samples.test_loader import Numbers, make_loaders, side_by_side


def worlds(num_ranks):
    return [World(rank=rank, world_size=num_ranks, seed=0) for rank in range(num_ranks)]


class Shuffled(IterableDataset):
    """0 to `length`, in an order that it draws from torch's global generator, as a buffered shuffle does."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(torch.randperm(self.length).tolist())


def read(share, num_workers=0, **options):
    return [item for batch in DataLoader(share, batch_size=2, num_workers=num_workers, **options) for item in batch]


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("num_ranks", "num_read"), [(1, 11), (2, 10), (4, 8)])
def test_each_item_of_a_whole_round_goes_to_one_rank_and_worker(num_ranks, num_read, num_workers):
    shares = [shard_iterable(Shuffled(11), world=world) for world in worlds(num_ranks)]
    items = [[int(item) for item in read(share, num_workers)] for share in shares]
    assert {len(of_rank) for of_rank in items} == {num_read // num_ranks}
    assert len({item for of_rank in items for item in of_rank}) == num_read


@pytest.mark.ranks
def test_a_dataset_that_shards_by_worker_is_not_split_twice():
    items = [sorted(map(int, read(shard_iterable(Numbers(12), world=world), 2))) for world in worlds(2)]
    assert items == [[*range(0, 12, 2)], [*range(1, 12, 2)]]


def test_only_a_share_is_decoded():
    decoded = []
    shares = [shard_iterable(range(11), decode=lambda i: decoded.append(i) or 2 * i, world=w) for w in worlds(2)]
    assert [list(share) for share in shares] == [[0, 4, 8, 12, 16], [2, 6, 10, 14, 18]]
    assert sorted(decoded) == list(range(10))


def test_length_is_that_of_the_rank():
    assert [len(shard_iterable(range(11), world=world)) for world in worlds(2)] == [5, 5]
    assert len(DataLoader(shard_iterable(range(11), world=worlds(2)[1]), batch_size=2)) == 3
    with pytest.raises(TypeError):
        len(shard_iterable(Shuffled(11), world=worlds(2)[0]))


def test_passes_differ_alike_on_all_ranks():
    shares = [shard_iterable(Shuffled(12), world=world) for world in worlds(2)]
    passes = [[list(share) for share in shares] for _ in range(2)]
    assert all(sorted(first + second) == list(range(12)) for first, second in passes)
    assert passes[0] != passes[1]
    shares[0].set_epoch(0)
    assert [list(shares[0]), list(shares[0])] == [passes[0][0], passes[1][0]]


@pytest.mark.ranks
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_hear_of_the_epoch(persistent_workers):
    here = shard_iterable(Shuffled(12), world=worlds(2)[0])
    share = shard_iterable(Shuffled(12), world=worlds(2)[0])
    loader = DataLoader(share, batch_size=None, num_workers=1, persistent_workers=persistent_workers)
    for epoch in (3, 1):
        share.set_epoch(epoch)
        here.set_epoch(epoch)
        assert list(loader) == list(here)


def test_make_loader_divides_only_the_batch_of_a_share():
    shares = iter([shard_iterable(range(13), decode=lambda i: 10 * i, world=world) for world in worlds(2)])
    loaders = make_loaders(2, lambda: next(shares), batch_size=4, already_sharded=True)
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    assert batches == [[[0, 20], [40, 60], [80, 100]], [[10, 30], [50, 70], [90, 110]]]
    assert [len(loader) for loader in loaders] == [3, 3]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda world: shard_iterable(iter([1, 2]), world=world), "list_iterator is an iterator.*epoch would be empty"),
        (lambda world: shard_iterable([1], world=world), "1 items for 2 ranks"),
        (lambda world: shard_iterable(shard_iterable([1, 2], world=world), world=world), "already this rank's share"),
    ],
)
def test_what_cannot_be_shared_is_refused(make, says):
    with pytest.raises(DataError, match=says):
        make(worlds(2)[1])


def test_a_share_is_not_split_again():
    world = side_by_side(2)[0]
    with pytest.raises(DataError, match=r"ShardedIterable is a stream.*pass already_sharded=True"):
        make_loader(shard_iterable(range(8), world=world), batch_size=2, world=world)
