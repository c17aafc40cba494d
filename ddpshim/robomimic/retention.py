"""Keeps the newest of robomimic's own checkpoints, those named for a result, and a link to the last one."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Optional

from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint.latest import link

# The number is followed by nothing, or by a result: best_validation_..., ..._success_...
_OF_AN_EPOCH = re.compile(r"model_epoch_(\d+)(.*)\.pth")


def keep(ckpt_path: str, num_kept: int, config: Any) -> None:
    """When `ckpt_path` is on disk, link it as latest.pth, and remove all but the newest `num_kept`. Local."""
    path = Path(ckpt_path)
    if _OF_AN_EPOCH.fullmatch(path.name):
        asked_for = config.experiment.save.epochs if config is not None else ()
        checkpoint.afterwards(remove_older, path, num_kept, [int(epoch) for epoch in asked_for])


def remove_older(written: Path, num_kept: int, asked_for: Collection[int]) -> None:
    """Remove older checkpoints, except those named for a result and the epochs in `asked_for`. Local.

    May run in the process that writes files in the background.
    """
    link(written, "latest.pth")
    found = _OF_AN_EPOCH.fullmatch(written.name)
    epoch = int(found[1]) if found else -1
    plain = {number: path for path in written.parent.iterdir() if (number := _epoch(path.name)) is not None}
    older = sorted(number for number in plain.keys() - set(asked_for) if number <= epoch)
    for number in older[:-num_kept]:
        plain[number].unlink()


def _epoch(name: str) -> Optional[int]:
    """Return the epoch of a file that is named for its epoch alone; else None."""
    found = _OF_AN_EPOCH.fullmatch(name)
    return int(found[1]) if found and not found[2] else None
