"""Failures named: the rank that failed first and its error are the last words, and the exit code; a hang is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.promises.running import trained

pytestmark = pytest.mark.launch
SAID = {
    "raises": (1, "ArithmeticError: the loss is no number"),
    "killed": (137, "SIGKILL (out of memory? see dmesg)"),
    "exits": (3, "exit code 3"),
    "leaves": (1, "SyncError: rank 1 ended without an error in the middle of the job (os._exit, exit code 0, killed)"),
    "dataset": (1, "ValueError: sample 13 is broken"),
}


@pytest.mark.parametrize(
    ("how", "door"), [*((how, "") for how in SAID), ("raises", "global"), ("killed", "shares"), ("dataset", "shares")]
)
def test_the_first_failure_is_the_last_line(how: str, door: str, tmp_path: Path) -> None:
    code, words = SAID[how]
    said = trained(tmp_path, "--drop-last", "--fail", how, door=door, ranks=2, code=code)
    last = said[said.rindex("ddpshim: ") :]
    assert words in last, said[-3000:]
    assert "rank 1" in last or how == "dataset", said[-3000:]


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    said = trained(tmp_path, "--fail", "hangs", ranks=3, code=1, DDPSHIM_TIMEOUT_S="5", DDPSHIM_SIDE_TIMEOUT_S="5")
    assert "for rank 1. Where each rank is:" in said or "rank 1 did not answer" in said, said[-3000:]
    assert re.search(r"rank 1: 2 backward passes; is in its own code \(.*trainer\.py:\d+\)", said), said[-3000:]
