"""Appends a run's records to files of JSON lines, one per rank. Imports no torch.

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
from typing import Any, NamedTuple, Optional, Union

from ddpshim import variables
from ddpshim.observe import sound
from ddpshim.process import events
from ddpshim.process.say import say
from ddpshim.reading import read_bytes

FOLDER = "ddpshim"
_NAME = re.compile(r"rank_(0|[1-9][0-9]{0,8})\.jsonl")
_START = '{"kind": "start"'

Record = dict[str, Any]


class _State:
    """The open file of this process; `file` is -1 if none is open."""

    file = -1
    path = Path()
    process = 0


_state = _State()


def begin(folder: Union[str, os.PathLike[str]], rank: int, **facts: Any) -> bool:
    """Open this rank's file below `folder`, and record the start with its `facts`; return whether that worked. Local.

    An existing file is appended to, on a new line if its last one is incomplete.
    """
    _close()
    path = Path(folder, FOLDER, f"rank_{rank}.jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        _say(path, error)
        return False
    _state.file, _state.path, _state.process = file, path, os.getpid()
    events.record_to(sys.modules[__name__])
    is_torn = False
    if os.fstat(file).st_size > 0:
        os.lseek(file, -1, os.SEEK_END)
        is_torn = os.read(file, 1) != b"\n"
    _append(("\n" if is_torn else "") + _line("start", {**facts, "rank": rank}))
    started_by = os.environ.get(variables.RUN_DIR)
    if started_by is not None and rank == 0:
        with contextlib.suppress(OSError):  # `ddpshim run` prints the records' place once all ranks have ended
            Path(started_by, FOLDER).write_text(str(Path(folder).absolute()))
    return is_on()


def is_on() -> bool:
    """Whether this process writes records; False in a fork of it. Local."""
    return _state.file >= 0 and _state.process == os.getpid()


def note(kind: str, **values: Any) -> None:
    """Append a record, if this process writes records. Local."""
    if is_on():
        _append(_line(kind, values))


def end(how: str, **values: Any) -> None:
    """Record how the run ended on this rank. The first call counts; nothing is recorded after it. Local."""
    note("end", how=how, **values)
    if is_on():
        _close()


def num_starts(folder: Union[str, os.PathLike[str]]) -> int:
    """Return how many starts the records below `folder` have. Local."""
    last = 0
    for path in files(folder).values():
        with contextlib.suppress(OSError):  # not reported here: appending to the file fails, too, and reports it
            for line in _lines(path):
                if line.startswith(_START):
                    with contextlib.suppress(ValueError, RecursionError):  # a torn line
                        record = json.loads(line)
                        last = max(last, record.get("start", 0) if sound.is_sound(record) else 0)
    return last


def files(folder: Union[str, os.PathLike[str]]) -> dict[int, Path]:
    """Return the files of records below `folder`, by rank. Local."""
    found = {path: _NAME.fullmatch(path.name) for path in Path(folder, FOLDER).glob("rank_*.jsonl")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


class Read(NamedTuple):
    """The contents of a file.

    Attributes:
        records: in order.
        num_torn: how many lines are invalid, because of a kill or a full disk; not counting an `is_begun` one.
        is_begun: whether the last line is invalid and has no newline, so that a rank may still be writing it.
    """

    records: list[Record]
    num_torn: int
    is_begun: bool


def read(path: Path) -> Read:
    """Return the contents of the file at `path`. Local. Raises OSError if it cannot be read."""
    found, num_torn = [], 0
    lines = _lines(path)
    is_whole = True
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        is_whole = sound.is_sound(record)
        if is_whole:
            found.append(record)
        else:
            num_torn += 1
    is_begun = bool(lines[-1].strip()) and not is_whole
    return Read(found, num_torn - is_begun, is_begun)


def _lines(path: Path) -> list[str]:
    return read_bytes(path).decode(errors="replace").split("\n")


def main_loss(metrics: Mapping[str, Any]) -> Optional[str]:
    """Return the name of the metric that is the loss: "Loss", or else the first one that contains "loss"."""
    return next((name for name in ("Loss", *sorted(metrics)) if name in metrics and "loss" in name.lower()), None)


def _line(kind: str, values: dict[str, Any]) -> str:
    return json.dumps({"kind": kind, "time": round(time.time(), 3), **values}, default=str) + "\n"


def _append(text: str) -> None:
    data = text.encode()
    try:
        if os.write(_state.file, data) < len(data):
            raise OSError("only a part of a line was written")
    except OSError as error:
        _say(_state.path, error)
        _close()


def _close() -> None:
    if is_on():
        os.close(_state.file)
    _state.file = -1
    events.record_to(None)


def _say(path: Path, error: OSError) -> None:
    say(
        f"{path} cannot be written ({error}); training continues, but its report will be incomplete. Make room "
        "there, or turn records off with DDPSHIM_RECORD=no.",
        directly=True,
    )
