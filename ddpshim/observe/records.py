"""Appends a run's records to files of JSON lines, one per rank, and reads them. Imports no torch.

Each line is appended by one system call. An error is reported once; training then continues without records.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

from ddpshim import variables
from ddpshim.process import observed
from ddpshim.process.say import say
from ddpshim.reading import read_bytes

FOLDER = "ddpshim"
_NAME = re.compile(r"rank_(0|[1-9][0-9]{0,8})\.jsonl")

PathLike = Union[str, os.PathLike[str]]
Record = dict[str, Any]
_state: dict[str, Any] = {}  # the open `file`, its `path`, and the `process` that opened it; empty without one


def begin(folder: PathLike, rank: int, **facts: Any) -> bool:
    """Open this rank's file below `folder`, and record the start with its `facts`; return whether that worked. Local.

    An existing file is appended to, after an empty line, as its last one may be incomplete.
    """
    _close()
    path = Path(folder, FOLDER, f"rank_{rank}.jsonl")
    try:
        with contextlib.suppress(FileExistsError):  # the main rank's, which other ranks of one program do not see
            path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        _say(path, error)
        return False
    _state.update(file=file, path=path, process=os.getpid())
    observed.record_to(sys.modules[__name__])
    if os.fstat(file).st_size:
        _append("\n")
    note("start", rank=rank, **facts)
    if rank == 0 and variables.RUN_DIR in os.environ:
        with contextlib.suppress(OSError):  # `ddpshim run` prints the records' place once all ranks have ended
            Path(os.environ[variables.RUN_DIR], FOLDER).write_text(str(Path(folder).absolute()))
    return is_on()


def is_on() -> bool:
    """Whether this process writes records; False in a fork of it. Local."""
    return _state.get("process") == os.getpid()


def note(kind: str, **values: Any) -> None:
    """Append a record, if this process writes records: after one of the kind "end" no more. Local."""
    if is_on():
        _append(json.dumps({"kind": kind, "time": round(time.time(), 3), **values}, default=str) + "\n")
    if kind == "end":
        _close()


def files(folder: PathLike) -> dict[int, Path]:
    """Return the files of records below `folder`, by rank. Local."""
    found = {path: _NAME.fullmatch(path.name) for path in Path(folder, FOLDER).glob("rank_*.jsonl")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def read(path: Path) -> tuple[list[Record], int]:
    """Return the records at `path` in order, and how many lines are torn, by a kill or a full disk. Local.

    The last line does not count as torn without a newline: a rank may still be writing it. Raises OSError if the file
    cannot be read.
    """
    *lines, last = read_bytes(path).decode(errors="replace").split("\n")
    found = [_record(line) for line in lines if line.strip()]
    return [record for record in (*found, _record(last)) if record is not None], found.count(None)


def _record(line: str) -> Optional[Record]:
    """Return the record in a line; None if it is torn, or of another program."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict) and "kind" in found and "time" in found:
            return found
    return None


def main_loss(metrics: Mapping[str, Any]) -> Optional[str]:
    """Return the name of the metric that is the loss: "Loss", or else the first one that contains "loss"."""
    return next((name for name in ("Loss", *sorted(metrics)) if name in metrics and "loss" in name.lower()), None)


def _append(text: str) -> None:
    data = text.encode()
    try:
        if os.write(_state["file"], data) < len(data):
            raise OSError("only a part of a line was written")
    except OSError as error:
        _say(_state["path"], error)
        _close()


def _close() -> None:
    if is_on():
        os.close(_state["file"])
    _state.clear()
    observed.record_to(None)


def _say(path: Path, error: OSError) -> None:
    say(
        f"{path} cannot be written ({error}); training continues, but its report will be incomplete. Make room "
        "there, or turn records off with DDPSHIM_RECORD=no.",
        directly=True,
    )
