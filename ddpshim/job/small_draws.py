"""Reports lines that draw once for each sample of a batch: on several ranks a rank draws for its own samples only."""

from __future__ import annotations

from typing import Any

from ddpshim.job.job import current
from ddpshim.job.say import say
from ddpshim.job.shares import Sharing
from ddpshim.job.users_line import users_line


class _Counts:
    """The small draws on the first batch of a job, by line of code."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.num_rows = 0
        self.of_line: dict[str, int] = {}
        self.are_read = False


def count(sharing: Sharing) -> None:
    """Count a draw; on the second batch, report lines that drew as often as this rank had rows. Rank 0 only; local."""
    counts = current().part(_Counts)
    if counts.are_read or sharing.share is None or sharing.share.rank:
        return
    if counts.batch in (None, sharing.last):
        counts.batch, counts.num_rows = sharing.last, sharing.share.num_rows
        line = users_line()
        counts.of_line[line] = counts.of_line.get(line, 0) + 1
        return
    counts.are_read = True
    for line, num in counts.of_line.items():
        if num == counts.num_rows > 1:
            say(
                f"{line} drew {num} times on the {num} rows of this rank: if it is in a loop over samples, all ranks "
                "draw the same, and one process would draw differently (option noise)"
            )
