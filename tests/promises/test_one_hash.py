"""One hash: with exact, weights have the same bits on any number of ranks; without it, in each repetition."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.compare import largest_difference
from tests.promises.running import trained, weights_of

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("door", ["", "global"])
def test_exact_has_one_hash_on_one_two_and_four_ranks(door: str, tmp_path: Path) -> None:
    for ranks in (1, 2, 4):
        trained(tmp_path / str(ranks), "--drop-last", door=door, ranks=ranks, DDPSHIM_EXACT="4")
    one, two, four = (weights_of(tmp_path / name) for name in "124")
    assert largest_difference(one, two) == largest_difference(one, four) == 0


def test_repeated_on_three_ranks(tmp_path: Path) -> None:
    for name in "ab":
        trained(tmp_path / name, ranks=3)
    assert largest_difference(weights_of(tmp_path / "a"), weights_of(tmp_path / "b")) == 0
