"""Records the paths that the runs of a proof make or change, removes those that they made and restores the others.

Removed is only what did not exist before and was seen to be made by these runs. A file that existed is copied before it
is changed. If they changed something else (a link, a folder), nothing is removed: what they made may be the only copy.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import posix
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ddpshim.process.say import count, say
from ddpshim.trainers.unedited.file_calls import LeftAlone, seen_by, watched
from ddpshim.trainers.unedited.file_overlay import copy_file
from ddpshim.trainers.unedited.main_file_log import without_links

RECORDS = "paths.jsonl"


class NewFiles:
    """Records the paths that this process and its forked children make or change."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{os.path.realpath(folder)}/"
        self._left = LeftAlone()
        self._copied = set[str]()
        self._until = contextlib.ExitStack()
        # Processes append whole lines, so the first line of a path tells its state before all of them.
        self._records = os.open(folder / RECORDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def install(self) -> None:
        """Start recording, until this process ends."""
        # Data workers are killed with the run, and would leave their own folders of sockets.
        multiprocessing.current_process()._config["tempdir"] = self._folder  # type: ignore[attr-defined]
        self._until.enter_context(watched(self._see))
        self._until.enter_context(seen_by(self._see, ("torch", "save", 1, "f")).installed())  # in C

    def _see(self, path: str, event: str, frame: FrameType, source: str) -> None:
        """Record that `path` is about to be changed (`file_calls.watched`)."""
        if self._left.takes_note(path, frame) or self._is_left(path):
            return
        state, moved = _state(path), "" if self._is_left(source) else source  # "": new, or it was a temporary file
        if state is not None or source or event != "os.rename":
            record = {"path": path, "state": state, "copy": state and self._copy(path), "moved": moved}
            posix.write(self._records, (json.dumps(record) + "\n").encode())

    def _is_left(self, path: str) -> bool:
        return path.startswith(self._folder) or "/__pycache__/" in f"{path}/" or self._left.has(path)

    def _copy(self, path: str) -> str:
        """Copy a file that is about to be changed for the first time; return where, "" if it cannot be."""
        info = posix.lstat(path)
        if path in self._copied or not stat.S_ISREG(info.st_mode):
            return ""
        self._copied.add(path)
        copy = f"{self._folder}before_{os.getpid()}_{len(self._copied)}"
        try:
            copy_file(path, copy)  # not by a rank's view, which refuses what the main rank has changed since
            posix.chmod(copy, stat.S_IMODE(info.st_mode))
            posix.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
        except OSError:  # a full disk: it is then reported
            return ""
        return copy


@contextlib.contextmanager
def without_traces() -> Iterator[Path]:
    """Yield a folder for the records of runs; at the end remove what they made, and say what is left. Local."""
    with tempfile.TemporaryDirectory(prefix="ddpshim-check-") as name:
        try:
            yield Path(name)
        finally:
            for sentence in remove(Path(name)):
                say(sentence)


def remove(folder: Path) -> list[str]:
    """Remove what the runs that were recorded in `folder` made, and return sentences about what is left. Local."""
    before = _before(folder)
    made = [path for path, record in before.items() if record is None]
    changed = {path: record["copy"] for path, record in before.items() if record and _state(path) != record["state"]}
    restored = [path for path, copy in changed.items() if copy]
    for path in restored:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        partial = f"{path}.restored-{os.getpid()}"
        shutil.copy2(changed.pop(path), partial)
        os.replace(partial, path)  # what is there now may be a link to another file
    if changed:
        changes = f"{next(iter(changed))}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}"
        tops = _tops(made)
        return [
            f"the trainer changed {changes}, which existed before. Nothing was removed: what the runs made may be the "
            f"only copy of it{'. They made: ' + ' '.join(map(shlex.quote, tops)) if tops else ''}"
        ]
    for path in sorted(made, key=len, reverse=True):
        with contextlib.suppress(OSError):  # gone already, or a folder with files of others
            (posix.rmdir if stat.S_ISDIR(posix.lstat(path).st_mode) else posix.unlink)(path)
    said = [f"restored {count(len(restored), 'file')} that the trainer changed: {restored[0]}"] if restored else []
    if left := _tops(made):
        said.append(
            f"{count(len(left), 'new path')} left: they hold files that these runs were not seen to write (a "
            "subprocess, a library in C, or another program wrote them). Remove them if you do not need them: rm -r "
            f"{' '.join(map(shlex.quote, left))}"
        )
    return said


def _before(folder: Path) -> dict[str, Any]:
    """Return the first record of each path that the runs made or may have changed; None if they made it."""
    path = folder / RECORDS
    before: dict[str, Any] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        place = without_links(record["path"].rstrip("/"), follows=False)
        if record["state"] is not None:
            before.setdefault(place, None if _is_in(place, before) else record)
        if record["moved"]:  # what is in a moved folder is now below its new name
            source = without_links(record["moved"].rstrip("/"), follows=False)
            for known in [known for known in before if f"{known}/".startswith(f"{source}/")]:
                if before[known] is None or before[known]["copy"]:
                    before.setdefault(place + known[len(source) :], None)
        elif record["state"] is None:
            before.setdefault(place, None)
    return before


def _tops(paths: Sequence[str]) -> list[str]:
    """Return those of the paths that exist and are in none of the others."""
    existing = {path: None for path in paths if _state(path) is not None}
    return sorted(path for path in existing if not _is_in(path, existing))


def _is_in(path: str, made: dict[str, Any]) -> bool:
    """Whether a folder above `path` is in `made`, with None."""
    return any(made.get(str(parent), path) is None for parent in Path(path).parents)


def _state(path: str) -> Any:
    """Return what shows that a path has changed; None if it does not exist. A folder changes only if it is replaced."""
    try:
        info = posix.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            return [info.st_ino, posix.readlink(path)]
    except OSError:
        return None
    return [info.st_ino] if stat.S_ISDIR(info.st_mode) else [info.st_ino, info.st_size, info.st_mtime_ns]
