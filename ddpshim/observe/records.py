"""Appends records of a run to a file of JSON lines, one for each rank. Imports no torch.

A line is appended by one call of the system; what cannot be written is reported once, and the training goes on.
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
from ddpshim.job import events
from ddpshim.job.say import say
from ddpshim.observe import sound
from ddpshim.reading import read_bytes

FOLDER = "ddpshim"
_NAME = re.compile(r"rank_(0|[1-9][0-9]{0,8})\.jsonl")
_START = '{"kind": "start"'

Record = dict[str, Any]


class _State:
    """The open file of this process; file is -1 where there is none."""

    file = -1
    path = Path()
    process = 0


_state = _State()


def begin(folder: Union[str, os.PathLike[str]], rank: int, **facts: Any) -> bool:
    """Open this rank's file below `folder`, and note the start with its `facts`; whether that was possible. Local.

    A file that is there is continued, behind a line that was left half written.
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
        with contextlib.suppress(OSError):  # `run` says where the records are, once all ranks have ended
            Path(started_by, FOLDER).write_text(str(Path(folder).absolute()))
    return is_on()


def is_on() -> bool:
    """Whether this process writes records. Local; not in a process that was forked from it."""
    return _state.file >= 0 and _state.process == os.getpid()


def note(kind: str, **values: Any) -> None:
    """Append a record, where this process writes any. Local."""
    if is_on():
        _append(_line(kind, values))


def end(how: str, **values: Any) -> None:
    """Note how the run ended on this rank, once: the first word counts, and nothing is noted after it. Local."""
    note("end", how=how, **values)
    if is_on():
        _close()


def num_starts(folder: Union[str, os.PathLike[str]]) -> int:
    """How often runs were started whose records are below `folder`. Local."""
    last = 0
    for path in files(folder).values():
        with contextlib.suppress(OSError):  # it is none of ours: what is appended to it meets that as well
            for line in _lines(path):
                if line.startswith(_START):
                    with contextlib.suppress(ValueError, RecursionError):  # a torn line
                        record = json.loads(line)
                        last = max(last, record.get("start", 0) if sound.is_sound(record) else 0)
    return last


def files(folder: Union[str, os.PathLike[str]]) -> dict[int, Path]:
    """The files of records below `folder`, by rank. Local."""
    found = {path: _NAME.fullmatch(path.name) for path in Path(folder, FOLDER).glob("rank_*.jsonl")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


class Read(NamedTuple):
    """What a file holds.

    Attributes:
        records: in order.
        num_torn: lines that are none: torn by a kill or a full disk.
        is_begun: whether the last line is one more that is none, and has no end: a writer may be in the middle of it.
    """

    records: list[Record]
    num_torn: int
    is_begun: bool


def read(path: Path) -> Read:
    """The records in the file at `path`. Local. Raises OSError where it cannot be read."""
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
    """The metric that counts as the loss: "Loss", or the first of those that are called so."""
    return next((name for name in ("Loss", *sorted(metrics)) if name in metrics and "loss" in name.lower()), None)


def _line(kind: str, values: dict[str, Any]) -> str:
    return json.dumps({"kind": kind, "time": round(time.time(), 3), **values}, default=str) + "\n"


def _append(text: str) -> None:
    data = text.encode()
    try:
        if os.write(_state.file, data) < len(data):
            raise OSError("the disk took only a part of a line")
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
