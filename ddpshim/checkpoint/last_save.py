"""Finds the newest saved step of a training by file names, and tells `python -m ddpshim run` where it is.

Imports no torch, so that `run` can say it at once after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Optional, Union

from ddpshim import variables

PATTERN = "epoch_*_step_*.pth"
_NAME = re.compile(r"epoch_(\d+)_step_(\d+)\.pth")
_NOTE = "progress"  # a file in RUN_DIR


def place(folder: Union[str, os.PathLike[str]]) -> str:
    """Return "epoch 3, step 15", the newest saved step in `folder`; "" without one. Local; reads names only."""
    found = [match for path in Path(folder).glob(PATTERN) if (match := _NAME.fullmatch(path.name))]
    newest = max(((int(match[1]), int(match[2])) for match in found), default=None)
    return "" if newest is None else f"epoch {newest[0]}, step {newest[1]}"


def note(folder: Path) -> None:
    """Tell `run`, if it started this rank, that SIGTERM saves progress in `folder`. Local."""
    with contextlib.suppress(OSError, KeyError):  # KeyError: not under `run`
        Path(os.environ[variables.RUN_DIR], _NOTE).write_text(str(folder.absolute()))


def forget() -> None:
    """Take `note` back: the training is complete. Local."""
    with contextlib.suppress(OSError, KeyError):
        Path(os.environ[variables.RUN_DIR], _NOTE).unlink()


def noted(run_dir: str) -> Optional[Path]:
    """Return the folder given to `note` by a rank of this `run`; None without one. Local."""
    note = Path(run_dir, _NOTE)
    return Path(note.read_text()) if note.exists() else None
