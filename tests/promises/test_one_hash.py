"""One hash: with exact, weights have the same bits on any number of ranks; without it, in each repetition."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddpshim
from ddpshim.errors import OptionsError, RankError
from ddpshim.options import Options
from evidence import exact
from evidence.compare import largest_difference
from tests.promises.running import trained, weights_of
from tests.ranks import run_ranks

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


def test_robomimic_as_released_has_one_hash(tmp_path: Path) -> None:
    """A policy with noise in its loss; the hash is of all bits, with logs and validation."""
    found = exact.train("0.3.0", "bc_vae", 4, (1, 2), tmp_path, steps=5, epochs=2)
    assert (len(set(found)), len(found[0])) == (1, 12), found


def test_exact_is_refused_where_bits_would_depend_on_the_number_of_ranks() -> None:
    ddpshim.cleanup()  # of a test before this one
    with pytest.raises(OptionsError, match=r"exact=4 in a process without a launcher.*with N one of 1, 2, 4"):
        ddpshim.setup(options=Options(exact=4))
    assert ddpshim.world().world_size == 1  # nothing was set up
    with pytest.raises(RankError, match="exact=4 in 3 ranks: 4 pieces of a batch cannot be divided evenly"):
        run_ranks(int, 3, environ={"DDPSHIM_EXACT": "4"})
    with pytest.raises(RankError, match=r"exact=4 with shares of batches.*batch=.global.*unedited"):
        run_ranks(int, 2, environ={"DDPSHIM_EXACT": "4"})
