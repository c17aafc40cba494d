"""Merges a patch set into a package that is no release, such as a fork: all files or none, revertible byte for byte."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Optional

from ddpshim.errors import PatchError, TargetError
from ddpshim.trainers.patching.files import (
    Changes,
    FileStatus,
    Outcome,
    Status,
    apply,
    look_at,
    status,
    turned,
    write_merged,
)
from ddpshim.trainers.patching.patchset import PatchSet, load_sets, transform_moved

_CONFLICT = re.compile(rb"^<{7}.*?^>{7}[^\n]*\n", re.MULTILINE | re.DOTALL)


def merge(
    target: str = "robomimic",
    base: Optional[str] = None,
    set_name: Optional[str] = None,
    patches_root: Optional[Path] = None,
    *,
    is_trial: bool = False,
) -> Outcome:
    """Patch a package whose files match no release; `changed` names the files. With `is_trial`, write nothing.

    A hunk is applied where its lines are, if they occur in the file exactly once. With `base`, the release that the
    package was forked from, the other files are merged three ways by `git merge-file`. The journal keeps the previous
    files for `revert`. Raises PatchError with all conflicts, and nothing changed.
    """
    look = status(target, set_name, patches_root)
    if look.state != "unknown":
        return Outcome(look, ()) if is_trial else apply(target, set_name, patches_root)
    release = None if base is None else _look_at_base(base, patches_root)
    sets = [s for s in load_sets(patches_root) if s.package == look.patch_set.package and s.name != look.patch_set.name]
    candidates = [look.patch_set, *([] if set_name else sets)] if release is None else [release.patch_set]
    refused: list[str] = []
    for candidate in (look_at(patch_set, look.directory) for patch_set in candidates):
        changes, conflicts = _merged(candidate, release)
        if not conflicts:
            return write_merged(candidate, changes, is_trial)
        refused = refused or conflicts
    hint = (
        "Or name the release that you forked from: --base FOLDER merges three ways. "
        if base is None
        else "Change these lines of yours so that they do not conflict, and merge again. "
    )
    raise PatchError(
        f"{look.patch_set.name} cannot be merged into {look.directory}; without these changes the ranks would train "
        "a different model than one process, so nothing was changed:\n  "
        + "\n  ".join(refused)
        + f"\n{hint}`python -m ddpshim docs MIGRATION`, section 2, explains each place."
    )


def _merged(look: Status, base: Optional[Status]) -> tuple[Changes, list[str]]:
    """Return the new content of each file, and a line for each conflict."""
    changes, conflicts = [], []
    for number, file in enumerate(look.files):
        if file.state == "missing":
            conflicts.append(f"{file.name}: does not exist")
            continue
        if file.state != "unknown":
            changes.append((file, turned(look.patch_set, file, "patched")))
            continue
        is_crlf = b"\r\n" in file.content
        content, _, odd = transform_moved(look.patch_set.patches, file.name, file.content.replace(b"\r\n", b"\n"))
        if odd and base is not None:
            content, odd = _three_ways(file, base.files[number], look.patch_set)
        conflicts += [f"{file.name}, {problem}" for problem in odd]
        changes.append((file, content.replace(b"\n", b"\r\n") if is_crlf else content))
    return changes, conflicts


def _look_at_base(base: str, patches_root: Optional[Path]) -> Status:
    look = status(base, patches_root=patches_root)
    odd = [file.name for file in look.files if file.state != "original"]
    if odd:
        raise TargetError(
            f"--base={base}: {', '.join(odd)} {'is' if len(odd) == 1 else 'are'} not as in {look.patch_set.name} "
            f"({look.patch_set.base}); your fork's own changes could not be told apart. Give an unpatched release."
        )
    return look


def _three_ways(file: FileStatus, base: FileStatus, patch_set: PatchSet) -> tuple[bytes, list[str]]:
    texts = (file.content, base.content, turned(patch_set, base, "patched"))
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder, name) for name in ("yours", "release", patch_set.name.replace("/", "-"))]
        for name, text in zip(names, texts):
            name.write_bytes(text.replace(b"\r\n", b"\n"))
        labels = [part for name in names for part in ("-L", name.name)]
        try:
            ran = subprocess.run(["git", "merge-file", "-p", *labels, *names], capture_output=True, check=False)
        except OSError as error:
            raise TargetError(f"git cannot be started ({error}); a three-way merge needs it. Install git.") from error
    return ran.stdout, _conflicts(ran.stdout)


def _conflicts(merged: bytes) -> list[str]:
    places = []
    for match in _CONFLICT.finditer(merged):
        line = merged.count(b"\n", 0, match.start()) + 1
        places.append(f"line {line}:\n" + match[0].decode(errors="replace").rstrip("\n"))
    return places
