"""Same noise: what a program draws, in its step, its network and its data workers, is what one process draws."""

from __future__ import annotations

from typing import Any

import pytest

from tests.promises.running import result, steps_of

pytestmark = pytest.mark.launch
Steps = list[dict[str, Any]]


@pytest.fixture(scope="module")
def both() -> tuple[Steps, Steps]:
    return steps_of(result("--batch", "7")), steps_of(result("--batch", "7", ranks=3))


@pytest.mark.parametrize("what", ["noise", "drawn", "x"])
def test_draws_are_those_of_one_process(both: tuple[Steps, Steps], what: str) -> None:
    """Of the loss; of torch, Python and numpy in the step; of the same three in data workers."""
    plain, found = ([step[what] for step in steps] for steps in both)
    assert len(plain) == 16
    assert found == plain
    assert len({str(value) for value in plain}) == 16


def test_the_losses_have_the_dropout_of_one_process(both: tuple[Steps, Steps]) -> None:
    plain, found = ([step["loss"] for step in steps] for steps in both)
    assert found == pytest.approx(plain, rel=1e-12)


def test_with_shares_each_rank_draws_its_own() -> None:
    """After `split_random_streams`: in the step, in the network, and in data workers."""
    ranks = [steps_of(result("--drop-last", door="shares", ranks=2), rank) for rank in "01"]
    assert [len(steps) for steps in ranks] == [6, 6]
    for what in ("noise", "drawn", "x"):
        values = {str(value) for steps in ranks for step in steps for value in step[what]}
        assert len(values) == sum(len(step[what]) for steps in ranks for step in steps), what
