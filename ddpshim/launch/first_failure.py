"""Reads the notes and logs of ranks that failed, and finds the first failure."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from ddpshim.failures.failure_notes import Note, meaning_of

_NUM_LINES_SHOWN = 20
_NUM_LINES_OF_WATCHDOG = 200  # nccl's watchdog prints stacks after its message


def read(run_dir: str) -> dict[int, Note]:
    """Return the notes that ranks wrote, by rank. Local."""
    return {int(file.suffix[1:]): Note(*json.loads(file.read_text())) for file in Path(run_dir).glob("failed.*")}


def forget(run_dir: str) -> None:
    """Remove all notes: the ranks are about to be restarted, and some may never write one. Local."""
    for file in Path(run_dir).glob("failed.*"):
        file.unlink()


def first(seen: Mapping[int, Any], notes: Mapping[int, Note], log_dir: Optional[Path] = None) -> tuple[int, int]:
    """Return the rank that failed first, and its exit code, from what torch's agent saw and the ranks' notes. Local.

    Args:
        seen: torch's `ProcessFailure` of each rank that failed.
        log_dir: where the ranks' logs are.
    """

    def order(rank: int) -> tuple[int, int, bool, float]:
        # First ranks with an error of their own, then those that only lost a peer (perhaps before the agent saw the
        # peer end), last those that the agent ended because of another one. Among them the earliest; the agent's times
        # are whole seconds, and within one second a rank with a note counts as first.
        own = notes.get(rank)
        if own is not None:
            return int(own.lost_a_peer), int(own.moment), False, own.moment
        code = seen[rank].exitcode
        # nccl's watchdog ends a process that waits for another one by SIGABRT: it only lost a peer.
        waited = code == -signal.SIGABRT and (log_dir is None or _ends_with_a_sign(log_dir / f"rank_{rank}.log"))
        return 2 if code == -signal.SIGTERM else int(waited), int(seen[rank].timestamp), True, 0.0

    first = min({*seen, *notes}, key=order)
    return first, notes[first].exit_code if first in notes else seen[first].exitcode


def _ends_with_a_sign(log: Path) -> bool:
    return meaning_of(end_of(log, _NUM_LINES_OF_WATCHDOG)) is not None


def end_of(log: Path, num_lines: int = _NUM_LINES_SHOWN) -> str:
    """Return the last lines of `log`, of a progress bar the last state; "" if it does not exist. Local."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - (1 << 16)))
        lines = file.read().decode(errors="replace").rstrip().split("\n")[-num_lines:]
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
