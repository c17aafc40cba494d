"""Same samples: each step trains on the samples of one process, in its order, for any batch size and any loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises.running import steps_of, trained

pytestmark = pytest.mark.launch
LOADERS = {
    "shuffled": (),
    "dropped": ("--drop-last",),
    "ordered": ("--ordered",),
    "batches of 7": ("--batch", "7"),
    "batches of 3": ("--batch", "3", "--epochs", "1"),
    "without workers": ("--workers", "0"),
}


@pytest.mark.parametrize("options", LOADERS.values(), ids=list(LOADERS))
def test_three_ranks_take_the_batches_of_one_process(options: tuple[str, ...], tmp_path: Path) -> None:
    trained(tmp_path / "one", *options)
    expected = [step["samples"] for step in steps_of(tmp_path / "one")]
    assert (expected[0] == sorted(expected[0])) == (options == ("--ordered",))
    for door in ("", "global"):
        folder = tmp_path / f"ranks{door}"
        trained(folder, *options, door=door, ranks=3)
        assert [step["samples"] for step in steps_of(folder)] == expected


@pytest.mark.parametrize("options", [("--drop-last",), ("--batch", "6", "--drop-last"), ("--ordered", "--drop-last")])
def test_shares_together_are_the_batches_of_one_process(options: tuple[str, ...], tmp_path: Path) -> None:
    ranks = 3 if "6" in options else 2
    trained(tmp_path / "one", *options, "--epochs", "1")
    trained(tmp_path / "ranks", *options, "--epochs", "1", door="shares", ranks=ranks)
    shares = [[step["samples"] for step in steps_of(tmp_path / "ranks", str(rank))] for rank in range(ranks)]
    together = [[sample for share in batch for sample in share] for batch in zip(*shares)]
    assert together == [step["samples"] for step in steps_of(tmp_path / "one")]
