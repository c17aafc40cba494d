"""Same samples: each step trains on the samples of one process, in its order, for any batch size and any loader."""

from __future__ import annotations

import pytest

from tests.promises.running import result, steps_of

pytestmark = pytest.mark.launch
LOADERS = {
    "batches of 7, shuffled": ("--batch", "7"),
    "batches of 3, at last 2, ordered": ("--batch", "3", "--epochs", "1", "--ordered"),
    "dropped, without workers": ("--drop-last", "--workers", "0"),
}


@pytest.mark.parametrize("options", LOADERS.values(), ids=list(LOADERS))
def test_three_ranks_take_the_batches_of_one_process(options: tuple[str, ...]) -> None:
    expected = [step["samples"] for step in steps_of(result(*options))]
    assert (expected[0] == sorted(expected[0])) == ("--ordered" in options)
    for door in ("", "global"):
        assert [step["samples"] for step in steps_of(result(*options, door=door, ranks=3))] == expected


@pytest.mark.parametrize(("ranks", "options"), [(3, ("--batch", "6")), (2, ("--ordered", "--batch", "16"))])
def test_shares_together_are_each_sample_once_an_epoch(ranks: int, options: tuple[str, ...]) -> None:
    size, found = int(options[-1]), result(*options, "--drop-last", door="shares", ranks=ranks)
    shares = [[step["samples"] for step in steps_of(found, str(rank))] for rank in range(ranks)]
    together = [sorted(sample for share in batch for sample in share) for batch in zip(*shares)]
    num = 53 // size
    assert len(together) == 2 * num
    for epoch in (together[:num], together[num:]):
        assert {len(batch) for batch in epoch} == {size}
        assert len({sample for batch in epoch for sample in batch}) == num * size
    in_order = [[*range(size * step, size * step + size)] for step in range(num)]
    assert (together[:num] == together[num:] == in_order) == ("--ordered" in options)
