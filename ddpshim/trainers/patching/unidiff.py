"""Reads unified diffs strictly and applies them exactly: no fuzz, no offset, both directions.

Works on bytes, so that encodings and line endings stay unchanged. GNU patch and ``git apply`` are not used: the first
moves a hunk to another place where it fits, the second can exit 0 without changing anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from ddpshim.errors import PatchError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class Hunk(NamedTuple):
    """Replaces the lines `old`, from index `old_at` (from 0), by `new`, which begin at `new_at`."""

    old_at: int
    old: tuple[bytes, ...]
    new_at: int
    new: tuple[bytes, ...]
    num_same: int  # context lines, in both `old` and `new`


@dataclass(frozen=True)
class FileDiff:
    """All hunks of one patch file for one target file; `path` is without the ``a/`` and ``b/``.

    `is_at_home`: the diff was made from that file; else the lines of each hunk occur there once, at other places.
    """

    path: str
    hunks: tuple[Hunk, ...]
    is_at_home: bool = True


def apply_diff(diff: FileDiff, content: bytes, *, reverse: bool = False) -> bytes:
    """Return the content after `diff`, or before it with `reverse`. Local.

    Raises PatchError if a line is not exactly where the diff says, or if a line without a newline would be
    followed by another.
    """
    if not diff.is_at_home:
        moved, odd = apply_moved(diff, content, reverse=reverse)
        if odd:
            raise PatchError(
                f"{diff.path}, {odd[0]}; the hunk would change the wrong code. Nothing was changed; use the content "
                "that the manifest was made from."
            )
        return moved
    lines = _split(content)
    result: list[bytes] = []
    position = 0
    for hunk in diff.hunks:
        at, old, new = (hunk.new_at, hunk.new, hunk.old) if reverse else (hunk.old_at, hunk.old, hunk.new)
        for index, want in enumerate(old, at):
            found = lines[index] if index < len(lines) else b"<end of file>"
            if found != want:
                raise PatchError(
                    f"{diff.path} line {index + 1} is {_show(found)}, the diff expects {_show(want)}; the hunk "
                    "would change the wrong code. Nothing was changed; use the content that the diff was made from."
                )
        if at > len(lines):
            raise PatchError(
                f"{diff.path} has {len(lines)} lines, a hunk inserts after line {at}; the place does not "
                "exist. Nothing was changed; use the content that the diff was made from."
            )
        result += lines[position:at] + list(new)
        position = at + len(old)
    result += lines[position:]
    if any(not line.endswith(b"\n") for line in result[:-1]):
        raise PatchError(
            f"{diff.path}: the diff leaves a line without a newline before the end of the file, which would "
            "join two lines. Make the diff again with `diff -u` from the two files."
        )
    return b"".join(result)


def apply_moved(diff: FileDiff, content: bytes, *, reverse: bool = False) -> tuple[bytes, list[str]]:
    """Apply each hunk whose old lines occur exactly once, at any place; with `reverse`, take it back. Local.

    Returns the content, and a line for each hunk that was not applied.
    """
    lines, odd = _split(content), []
    for hunk in diff.hunks:
        old, new = (hunk.new, hunk.old) if reverse else (hunk.old, hunk.new)
        size = len(old)
        places = [at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == old] if size else []
        if len(places) == 1:
            lines[places[0] : places[0] + size] = new
        elif not size:
            odd.append(f"line {hunk.old_at}: has no unchanged line to find it by; place it by hand")
        else:
            first = next(line for line in [*old, b""] if line.strip() or not line)
            where = f"at lines {', '.join(str(at + 1) for at in places)}" if places else "nowhere"
            odd.append(f"line {hunk.old_at + 1}: {_show(first.strip())} and the lines after it occur {where}")
    return b"".join(lines), odd


def parse_diff(text: bytes, name: str) -> tuple[FileDiff, ...]:
    """Return the file diffs of one patch file in order; free text (a DEP-3 header) may precede the first.

    A patch file in which every line ends in CRLF (a checkout with ``core.autocrlf``) is read as if it had LF.
    `name` is for messages. Raises PatchError with the line number if the text is not a well-formed diff
    of existing files: wrong counts, hunks out of order, a path that leaves the tree, a rename or mode change.
    """
    if b"\n" in text and text.count(b"\r\n") == text.count(b"\n"):
        text = text.replace(b"\r\n", b"\n")
    return _Parser(_split(text), name).files()


class _Parser:
    """A cursor over the lines of one patch file."""

    def __init__(self, lines: list[bytes], name: str) -> None:
        self.lines = lines
        self.name = name
        self.at = 0

    def files(self) -> tuple[FileDiff, ...]:
        found: list[FileDiff] = []
        git_header = False
        while self.at < len(self.lines):
            line = self.peek()
            if line.startswith(b"--- ") and self.peek(1).startswith(b"+++ "):
                found.append(self.file())
                git_header = False
            elif line.startswith(b"diff "):
                git_header = True
                self.at += 1
            elif line.startswith(b"index ") or not (found or git_header or line.startswith(b"@@")):
                self.at += 1
            else:
                self.fail(
                    f"{_show(line)} is neither a hunk, a file header nor inside a hunk's counts (renames, "
                    "mode changes, new and deleted files are not for patch sets)"
                )
        if not found:
            self.fail("no `--- a/…` and `+++ b/…` pair found")
        return tuple(found)

    def file(self) -> FileDiff:
        old_path, new_path = self.path(b"a/"), self.path(b"b/")
        if old_path != new_path:
            self.fail(f"the two names differ: {old_path} and {new_path}")
        hunks: list[Hunk] = []
        while self.peek().startswith(b"@@"):
            hunk = self.hunk()
            # Positions in the new file follow from the old ones. Without this check, a revert, which uses the new
            # ones, could look at other lines than apply wrote.
            new_at = hunk.old_at + sum(len(before.new) - len(before.old) for before in hunks)
            if hunk.new_at != new_at:
                self.fail(
                    f"the hunk starts at new line index {hunk.new_at}, but the hunks before it put it at {new_at}"
                )
            if hunks and hunk.old_at < hunks[-1].old_at + len(hunks[-1].old):
                self.fail("the hunk overlaps the one before it, or is out of order")
            hunks.append(hunk)
        if not hunks:
            self.fail(f"no hunk for {old_path}")
        return FileDiff(old_path, tuple(hunks))

    def hunk(self) -> Hunk:
        match = _HUNK.match(self.peek())
        if match is None:
            self.fail(f"{_show(self.peek())} is not `@@ -start,count +start,count @@`")
        old_start, num_old, new_start, num_new = (int(g) if g is not None else 1 for g in match.groups())
        if (num_old and not old_start) or (num_new and not new_start):
            self.fail("line numbers start at 1")
        self.at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        num_same = 0
        while (len(old), len(new)) != (num_old, num_new):
            line = self.peek()
            tag, body = line[:1], line[1:]
            # A body without newline means that the patch file was cut off, not a "\\ No newline" line.
            is_line = tag in (b" ", b"-", b"+") and body.endswith(b"\n")
            if not is_line or len(old) > num_old or len(new) > num_new:
                self.fail(f"the hunk counts {num_old},{num_new} lines but has {len(old)},{len(new)}")
            self.at += 1
            if self.peek().startswith(b"\\"):
                self.at += 1
                body = body[: -len(b"\n")]
            if tag != b"+":
                old.append(body)
            if tag != b"-":
                new.append(body)
            num_same += tag == b" "
        if num_same == len(old) == len(new):
            self.fail("the hunk changes nothing")
        # With a count of 0, the header names the line *before* the gap, otherwise the first line itself.
        old_at = old_start - 1 if num_old else old_start
        new_at = new_start - 1 if num_new else new_start
        return Hunk(old_at, tuple(old), new_at, tuple(new), num_same)

    def path(self, prefix: bytes) -> str:
        raw = self.peek()[len(b"--- ") :].split(b"\t")[0].strip()
        path = raw[len(prefix) :].decode(errors="replace")
        parts = path.split("/")
        inside = len(parts) > 1 and all(part.strip(".") for part in parts) and "\\" not in path
        if not raw.startswith(prefix) or not inside:
            self.fail(f"{_show(raw)} is not {prefix.decode()}PACKAGE/FILE inside the tree")
        self.at += 1
        return path

    def peek(self, ahead: int = 0) -> bytes:
        return self.lines[self.at + ahead] if self.at + ahead < len(self.lines) else b""

    def fail(self, reason: str) -> NoReturn:
        raise PatchError(
            f"{self.name} line {self.at + 1}: {reason}; applying it would be a guess. Make the patch "
            "again with `diff -u` from the two files."
        )


def _split(content: bytes) -> list[bytes]:
    """Return lines with their newline, split at LF only: `bytes.splitlines` would also split at a lone CR."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def _show(line: bytes) -> str:
    return repr(line.decode(errors="replace"))
