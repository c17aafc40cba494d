"""Resume: a stopped training goes on where it was, on any number of ranks, as if it had not been stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpshim.process.launch_env import EXIT_REQUEUE
from evidence.compare import largest_difference
from tests.promises.running import result, steps_of, trained, weights_of

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_stopped_by_a_signal_and_started_on_other_ranks(before: int, after: int, tmp_path: Path) -> None:
    options = ("--drop-last", "--epochs", "3", "--batch", "12", "--stop-at")
    whole = result(*options, "1000", door="shares", ranks=2)
    trained(tmp_path / "parts", *options, "6", door="shares", ranks=before, code=EXIT_REQUEUE)
    trained(tmp_path / "parts", *options, "1000", door="shares", ranks=after, DDPSHIM_RESUME="always")
    assert largest_difference(weights_of(whole), weights_of(tmp_path / "parts")) < 1e-13
    if after > 1:
        assert len(steps_of(tmp_path / "parts", "0")) == len(steps_of(whole, "0")) == 12
