"""Resume: a stopped training goes on where it was, on any number of ranks, as if it had not been stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpshim.process.launch_env import EXIT_REQUEUE
from evidence.compare import largest_difference
from tests.promises.running import result, steps_of, trained, weights_of

pytestmark = pytest.mark.launch
OPTIONS = ("--drop-last", "--epochs", "3", "--batch", "12", "--stop-at")


def _stopped(folder: Path, door: str, before: int, after: int) -> Path:
    """Train on `before` ranks until a signal comes, and then on `after` ranks."""
    trained(folder, *OPTIONS, "6", door=door, ranks=before, code=EXIT_REQUEUE)
    trained(folder, *OPTIONS, "1000", door=door, ranks=after, DDPSHIM_RESUME="always")
    return folder


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_with_whole_batches_numbers_are_those_without_a_stop(before: int, after: int, tmp_path: Path) -> None:
    whole, parts = result(*OPTIONS, "1000", door="global"), _stopped(tmp_path / "parts", "global", before, after)
    assert largest_difference(weights_of(whole), weights_of(parts)) < 1e-13
    assert [step["samples"] for step in steps_of(parts)] == [step["samples"] for step in steps_of(whole)]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_with_shares_exactly_the_samples_that_remain_are_seen(before: int, after: int, tmp_path: Path) -> None:
    whole = result(*OPTIONS, "1000", door="shares", ranks=2)
    parts = _stopped(tmp_path / "parts", "shares", before, after)
    ranks = [[step["samples"] for step in steps_of(parts, str(rank))] for rank in range(max(before, after))]
    num_before = len(ranks[0]) - len(ranks[-1]) if after > before else len(ranks[-1])
    assert 0 < num_before < 12 == len(ranks[0])
    found = [*zip(*(own[:num_before] for own in ranks[:before]))]
    found += [*zip(*(own[-12 + num_before :] for own in ranks[:after]))]
    expected = [[step["samples"] for step in steps_of(whole, rank)] for rank in "01"]
    assert [_together(batch) for batch in found] == [_together(batch) for batch in zip(*expected)]


def _together(shares: tuple[list[int], ...]) -> list[int]:
    return sorted(sample for share in shares for sample in share)
