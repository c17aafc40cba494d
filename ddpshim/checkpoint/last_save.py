"""Finds the newest saved step of a training by file names. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Union

PATTERN = "epoch_*_step_*.pth"
_NAME = re.compile(r"epoch_(\d+)_step_(\d+)\.pth")


def place(folder: Union[str, os.PathLike[str]]) -> str:
    """Return "epoch 3, step 15", the newest saved step in `folder`; "" without one. Local; reads names only."""
    found = [match for path in Path(folder).glob(PATTERN) if (match := _NAME.fullmatch(path.name))]
    newest = max(((int(match[1]), int(match[2])) for match in found), default=None)
    return "" if newest is None else f"epoch {newest[0]}, step {newest[1]}"
