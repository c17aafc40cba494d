"""Modes that meet: some rows of evidence/modes.md, which has every pair."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from evidence import modes

ROWS = modes.covering_rows()
PLAINEST = {name: values[0] for name, values in modes.FACTORS.items()}
# After an interruption torch's own loader makes its workers, and draws their seed, another time.
STAYS = {**PLAINEST, "door": "global", "workers": "persistent", "sampler": "generator", "resume": "signal"}


def test_every_two_values_meet_that_can() -> None:
    items = [(name, value) for name, values in modes.FACTORS.items() for value in values]
    can_meet = {(a, b) for a, b in itertools.permutations(items, 2) if a[0] != b[0] and modes.is_possible(dict((a, b)))}
    assert can_meet == {both for row in ROWS for both in itertools.permutations(row.items(), 2)}
    assert all(modes.is_possible(row) for row in ROWS)
    assert len(ROWS) <= 70


ROUNDS = {**PLAINEST, "door": "global", "net": "batchnorm", "precision": "bf16"}  # autocast is on in its messages


@pytest.mark.launch
@pytest.mark.parametrize("row", [*ROWS[:4], STAYS, ROUNDS], ids=modes.words_of)
def test_ranks_equal_one_process_in_modes_that_meet(row: modes.Row, tmp_path: Path) -> None:
    outcome = modes.judge(row, tmp_path)
    assert outcome.kind not in modes.FAULTS, f"{modes.words_of(row)}: {outcome}"
