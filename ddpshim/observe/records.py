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
from typing import Any, Optional, Union

from ddpshim import variables
from ddpshim.observe import sound
from ddpshim.process import events
from ddpshim.process.say import say
from ddpshim.reading import read_bytes

FOLDER = "ddpshim"
_NAME = re.compile(r"rank_(0|[1-9][0-9]{0,8})\.jsonl")

Record = dict[str, Any]


class _State:
    """The open file of this process; `file` is -1 if none is open."""

    file = -1
    path = Path()
    process = 0


_state = _State()


def begin(folder: Union[str, os.PathLike[str]], rank: int, **facts: Any) -> bool:
    """Open this rank's file below `folder`, and record the start with its `facts`; return whether that worked. Local.

    An existing file is appended to, after an empty line, as its last one may be incomplete.
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
    _append(("\n" if os.fstat(file).st_size else "") + _line("start", {**facts, "rank": rank}))
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
    starts = [0]
    with contextlib.suppress(OSError):  # not reported here: `begin` gets the same error, and reports it
        found = (record for path in files(folder).values() for record in read(path)[0])
        starts += [record.get("start", 0) for record in found if record["kind"] == "start"]
    return max(starts)


def files(folder: Union[str, os.PathLike[str]]) -> dict[int, Path]:
    """Return the files of records below `folder`, by rank. Local."""
    found = {path: _NAME.fullmatch(path.name) for path in Path(folder, FOLDER).glob("rank_*.jsonl")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def read(path: Path) -> tuple[list[Record], int]:
    """Return the records at `path` in order, and how many lines are torn, by a kill or a full disk. Local.

    The last line does not count as torn without a newline: a rank may still be writing it. Raises OSError if the file
    cannot be read.
    """
    lines = read_bytes(path).decode(errors="replace").split("\n")
    found = [_record(line) for line in lines if line.strip()]
    num_torn = found.count(None) - (bool(lines[-1].strip()) and found[-1] is None)
    return [record for record in found if record is not None], num_torn


def _record(line: str) -> Optional[Record]:
    """Return the record in a line; None if it is torn, or of another program."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
        return found if sound.is_sound(found) else None
    return None


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
