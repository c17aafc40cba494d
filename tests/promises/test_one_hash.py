"""One hash: with exact, weights have the same bits on any number of ranks; without it, in each repetition."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddpshim
from ddpshim.errors import OptionsError, RankError
from ddpshim.options import Options
from evidence import exact
from evidence.compare import largest_difference
from tests.promises.running import result, trained, weights_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.launch


def test_exact_has_one_hash_on_one_two_and_four_ranks(tmp_path: Path) -> None:
    found = []
    for door, ranks in (("", 1), ("", 2), ("", 4), ("global", 1), ("global", 4)):
        trained(tmp_path / f"{door}{ranks}", "--drop-last", door=door, ranks=ranks, DDPSHIM_EXACT="4")
        found.append(weights_of(tmp_path / f"{door}{ranks}"))
    assert [largest_difference(found[0], other) for other in found] == [0] * 5


def test_repeated_on_three_ranks(tmp_path: Path) -> None:
    trained(tmp_path, "--batch", "7", ranks=3)
    assert largest_difference(weights_of(tmp_path), weights_of(result("--batch", "7", ranks=3))) == 0


def test_robomimic_as_released_has_one_hash(tmp_path: Path) -> None:
    """A policy with noise in its loss; the hash is of all bits, with logs and validation."""
    found = exact.train("0.3.0", "bc_vae", 4, (1, 2), tmp_path, steps=5, epochs=2)
    assert (len(set(found)), len(found[0])) == (1, 12), found


def _set_up_for_whole_batches() -> None:
    ddpshim.cleanup()
    ddpshim.setup(batch="global", device="cpu", options=Options(exact=4))


def test_exact_is_refused_where_bits_would_depend_on_the_number_of_ranks() -> None:
    ddpshim.cleanup()  # of a test before this one
    with pytest.raises(OptionsError, match=r"exact=4 in a process without a launcher.*with N one of 1, 2, 4"):
        ddpshim.setup(options=Options(exact=4))
    assert ddpshim.world().world_size == 1  # nothing was set up
    with pytest.raises(RankError, match="exact=4 in 3 ranks: 4 virtual ranks do not spread evenly"):
        run_ranks(_set_up_for_whole_batches, 3)
    with pytest.raises(RankError, match=r"exact=4 with local batches.*batch=.global.*unmodified"):
        run_ranks(int, 2, environ={"DDPSHIM_EXACT": "4"})
