"""Chooses a patch set by the content of files; checks, applies, reverts and reports it.

Only content hashes decide what is written. A version string is printed, and breaks ties between sets that do not fit.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ddpshim.errors import PatchError, TargetError
from ddpshim.reading import read_bytes
from ddpshim.trainers.patching.patchset import Hashes, PatchSet, load_sets, read, sha256, transform
from ddpshim.trainers.patching.replacing import drop_bytecode, locked, replace, stage, temporary

JOURNAL = ".ddpshim-journal.json"
_WORDS = {"original": "not applied", "patched": "applied"}


@dataclass(frozen=True)
class FileStatus:
    """One target file: `state` is original, patched, unknown or missing; `path` is without symlinks."""

    name: str
    path: Path
    state: str
    sha256: str
    crlf: bool = False
    content: bytes = b""


@dataclass(frozen=True)
class Status:
    """The state of one package folder with respect to one patch set."""

    patch_set: PatchSet
    directory: Path
    files: tuple[FileStatus, ...]
    journal: Optional[dict[str, Any]]

    @property
    def state(self) -> str:
        """``not applied``, ``applied``, ``partly applied`` or ``unknown`` (the set does not fit)."""
        states = {file.state for file in self.files}
        if states & {"unknown", "missing"}:
            return "unknown"
        return _WORDS[states.pop()] if len(states) == 1 else "partly applied"

    @property
    def num_known(self) -> int:
        return sum(file.state in _WORDS for file in self.files)


class Outcome(NamedTuple):
    """The resulting status, and the files that were changed (for `check`: would be)."""

    status: Status
    changed: tuple[str, ...]


def status(target: str = "robomimic", set_name: Optional[str] = None, patches_root: Optional[Path] = None) -> Status:
    """Return the status of the only set whose files all match, or of the nearest with state ``unknown``; reads only.

    `target` is the name of an installed package (not imported), or a folder that is the package or contains it.
    `set_name` (``robomimic/0.3.0`` or ``0.3.0``) restricts the choice, but all files must still match.
    Raises PatchError if the target or the set is not found, or if two different sets match.
    """
    sets = load_sets(patches_root)
    package, directory = _find_package(target, sorted({s.package for s in sets}))
    chosen = [s for s in sets if s.package == package and set_name in (None, s.name, s.version)]
    if not chosen:
        raise TargetError(
            f"ddpshim carries no patch set {set_name!r} for {package}; there is nothing to compare "
            f"{directory} with. Use one of: {', '.join(s.name for s in sets)}."
        )
    looks = [look_at(patch_set, directory) for patch_set in chosen]
    fitting = [look for look in looks if look.state != "unknown"]
    journal_name = (looks[0].journal or {}).get("set")
    if not fitting:
        stated = _stated_version(directory)
        return max(looks, key=lambda s: (s.num_known, s.patch_set.name == journal_name, s.patch_set.version == stated))
    recorded = [look for look in fitting if look.patch_set.name == journal_name]
    if not recorded and any(look.patch_set.files != fitting[0].patch_set.files for look in fitting):
        names = ", ".join(look.patch_set.name for look in fitting)
        raise PatchError(f"{directory} matches several different sets ({names}). Choose one with --set.")
    return (recorded or fitting)[0]


def check(target: str = "robomimic", set_name: Optional[str] = None, patches_root: Optional[Path] = None) -> Outcome:
    """Return what `apply` would change: does everything except writing. Raises as `apply` does."""
    look = status(target, set_name, patches_root)
    changes = _plan(look, "patched", patches_root)
    if changes:
        _require_writable(look, changes)
    return Outcome(look, tuple(file.name for file, _ in changes))


def apply(target: str = "robomimic", set_name: Optional[str] = None, patches_root: Optional[Path] = None) -> Outcome:
    """Patch the package, all files or none; `changed` is empty if it already was patched. Completes a partial apply.

    Files are replaced through a temporary file, never written in place: package managers hard-link
    installed files to a cache that other environments share. Safe if a second process does the same.
    Raises PatchError, with nothing changed, if a file is unknown or cannot be replaced.
    """
    return _turn("patched", target, set_name, patches_root)


def revert(target: str = "robomimic", set_name: Optional[str] = None, patches_root: Optional[Path] = None) -> Outcome:
    """Restore the original files, byte for byte, by reversing the diffs. Otherwise like `apply`."""
    return _turn("original", target, set_name, patches_root)


Changes = list[tuple[FileStatus, bytes]]


def _turn(wanted: str, target: str, set_name: Optional[str], patches_root: Optional[Path]) -> Outcome:
    look = status(target, set_name, patches_root)
    changes = _plan(look, wanted, patches_root)
    if not changes and _journal_settled(look, wanted):
        return Outcome(look, ())
    _require_writable(look, changes)
    with locked(look.directory):
        # Again: another process may have worked on the files while this one waited for the lock.
        look = status(target, set_name, patches_root)
        changes = _plan(look, wanted, patches_root)
        files = {
            file.name: {
                "before": sha256(turned(look.patch_set, file, "original")),
                "after": sha256(turned(look.patch_set, file, "patched")),
            }
            for file in look.files
        }
        _write(look, changes, _record(look, "applying" if wanted == "patched" else "reverting", files))
        after = look_at(look.patch_set, look.directory)
        wrong = [file.name for file in after.files if file.state != wanted]
        if wrong:
            raise PatchError(
                f"After writing, {', '.join(wrong)} in {look.directory} is not the {wanted} content; another "
                "program writes there. Stop it, then run `python -m ddpshim patch status`."
            )
        _close_journal(after, wanted)
    return Outcome(look_at(look.patch_set, look.directory), tuple(file.name for file, _ in changes))


def _plan(look: Status, wanted: str, patches_root: Optional[Path]) -> Changes:
    """Return the new content of every file not in the wanted state, each verified against the manifest."""
    if look.state == "unknown":
        raise PatchError(_refusal(look, load_sets(patches_root)))
    return [(file, turned(look.patch_set, file, wanted)) for file in look.files if file.state != wanted]


def turned(patch_set: PatchSet, file: FileStatus, wanted: str) -> bytes:
    """Return the content of `file` in the wanted state, with the file's line endings. Local.

    Raises PatchError if the result does not have the manifest's hash.
    """
    if file.state == wanted:
        return file.content
    content = file.content.replace(b"\r\n", b"\n") if file.crlf else file.content
    content = transform(patch_set.patches, file.name, content, wanted)
    found, expected = sha256(content), getattr(patch_set.files[file.name], wanted)
    if found != expected:
        raise PatchError(
            f"The diffs of {patch_set.name} turn {file.name} into {found}, but the manifest says {expected}: the "
            "set is damaged, and nothing was changed. Reinstall ddpshim, or rebuild the manifest if you edited a "
            "diff."
        )
    return content.replace(b"\n", b"\r\n") if file.crlf else content


def look_at(patch_set: PatchSet, directory: Path) -> Status:
    """Return the state of the package in `directory` with respect to this set. Local; reads only."""
    files: list[FileStatus] = []
    for name, hashes in patch_set.files.items():
        # `directory` replaces the first component, since an editable install may have any folder name. A symlink is
        # followed, so that its target is replaced and the link remains.
        path = Path(os.path.realpath(directory / name.split("/", 1)[1]))
        if not path.is_file():
            files.append(FileStatus(name, path, "missing", "missing"))
            continue
        content = read(path)
        found = sha256(content)
        state, crlf = _state(hashes, found), False
        unix = content.replace(b"\r\n", b"\n")
        if state == "unknown" and unix != content and unix.replace(b"\n", b"\r\n") == content:
            state, crlf = _state(hashes, sha256(unix)), True
        files.append(FileStatus(name, path, state, found, crlf, content))
    return Status(patch_set, directory, tuple(files), _read_journal(directory))


def _state(hashes: Hashes, found: str) -> str:
    return {hashes.original: "original", hashes.patched: "patched"}.get(found, "unknown")


def _refusal(look: Status, sets: Sequence[PatchSet]) -> str:
    """Return the message for a package that no set fits: every file with both hashes, and what to do."""
    patch_set, stated = look.patch_set, _stated_version(look.directory)
    lines = [
        f"{look.directory} is not a release that ddpshim knows; patching it would mix releases or overwrite "
        f"edits, so nothing was changed. Nearest set: {patch_set.name} ({look.num_known} of "
        f"{len(look.files)} files match; the package calls itself {stated or 'nothing'}).",
    ]
    for file in look.files:
        expected = patch_set.files[file.name]
        owners = [
            f"{_state(other.files[file.name], file.sha256)} in {other.name}"
            for other in sets
            if file.name in other.files and _state(other.files[file.name], file.sha256) != "unknown"
        ]
        known = file.state if file.state in _WORDS else ", ".join(owners) or file.state
        lines += [
            f"  {file.name}: {known}",
            f"    found     {file.sha256}",
            f"    expected  {expected.original} (original in {patch_set.name})",
            f"           or {expected.patched} (patched in {patch_set.name})",
        ]
    journal = look.journal or {}
    recorded = [entry.get("after") for entry in journal.get("files", {}).values()]
    if any(file.state == "unknown" and file.sha256 in recorded for file in look.files):
        lines.append(
            f"The journal says that ddpshim {journal.get('ddpshim')} applied its own {journal.get('set')}: "
            "revert with that version first."
        )
    commit = re.search(r"\b[0-9a-f]{7,40}\b", patch_set.base)
    fresh = (
        f"`git checkout {commit.group()} -- {patch_set.package}` in the checkout"
        if commit
        else f"`pip install --force-reinstall --no-deps {patch_set.codebase}=={patch_set.version}`"
    )
    lines.append(
        "In a fork, merge the set by `git merge-file` (`python -m ddpshim docs MIGRATION`, section 2). Otherwise undo "
        f"your edits, or get the release again with {fresh}, and retry. If you changed nothing, open an issue at "
        "ddpshim with the hashes above."
    )
    return "\n".join(lines)


def _record(look: Status, state: str, files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the journal's content; `files`: hashes before and after."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"set": look.patch_set.name, "state": state, "ddpshim": _own_version(), "time": when, "files": files}


def _write(look: Status, changes: Changes, record: Mapping[str, Any]) -> None:
    """Write the journal and then every file; on an error, restore all of them."""
    journal = look.directory / JOURNAL
    before: dict[Path, Optional[bytes]] = {file.path: file.content for file, _ in changes}
    before[journal] = read(journal) if journal.exists() else None
    after = {journal: _as_json(record), **{file.path: new for file, new in changes}}
    try:
        for file in look.files:  # remains of a killed run
            temporary(file.path).unlink(missing_ok=True)
        for path, content in after.items():
            stage(path, content)
        for path in after:
            os.replace(temporary(path), path)
        for file in look.files:
            drop_bytecode(look.directory / file.name.split("/", 1)[1], file.path)
    except BaseException as error:
        _put_back(look.directory, before, error)
        if isinstance(error, OSError):
            raise PatchError(
                f"Could not replace files in {look.directory}: {error}. A half-patched package would not run, so "
                "all files were restored. Fix the cause (permissions, disk space) and retry."
            ) from error
        raise


def _put_back(directory: Path, before: dict[Path, Optional[bytes]], cause: BaseException) -> None:
    try:
        for path, content in before.items():
            temporary(path).unlink(missing_ok=True)
            if content is None:
                path.unlink(missing_ok=True)
            elif path.read_bytes() != content:
                replace(path, content)
    except OSError as error:
        raise PatchError(
            f"Replacing files in {directory} failed ({cause}), and so did restoring them ({error}); the package is "
            "partly patched and may not run. Fix the cause, then `python -m ddpshim patch apply` or `revert` "
            "completes it."
        ) from cause


def _as_json(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()


def _require_writable(look: Status, changes: Changes) -> None:
    # Replacing a file needs its folder's permission, not the file's: a read-only file stays one.
    for folder in sorted({look.directory, *(file.path.parent for file, _ in changes)}):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PatchError(
                f"{folder} is not writable for this user; nothing was changed. Use your own environment, or run as "
                "the user who installed the package."
            )


def _find_package(target: str, packages: Sequence[str]) -> tuple[str, Path]:
    """Return the package name and its folder, without importing it."""
    if target in packages:
        spec = importlib.util.find_spec(target)
        if spec is None:
            raise TargetError(
                f"{target} is not installed for {sys.executable}; there is nothing to patch. Install it, use the "
                f"Python that has it, or give its folder with --target PATH (here: ./{target})."
            )
        if spec.origin is None or not spec.submodule_search_locations:
            raise TargetError(
                f"{target} resolves to {list(spec.submodule_search_locations or [])}, which has no __init__.py (the "
                "root of a checkout?), so it is unclear what Python would run. Give the package folder with "
                "--target PATH."
            )
        return target, Path(spec.submodule_search_locations[0])
    path = Path(os.path.abspath(os.path.expanduser(target)))
    for package in packages:
        if (path / package).is_dir():
            return package, path / package
    if path.name in packages and path.is_dir():
        return path.name, path
    raise TargetError(
        f"{target!r} is neither a package that ddpshim has patches for ({', '.join(packages)}) nor a folder "
        f"that is or contains one ({path}); there is nothing to patch. Correct --target."
    )


def _read_journal(directory: Path) -> Optional[dict[str, Any]]:
    """Return the journal of the last apply; None if it is absent or damaged, which is no error: only hashes decide."""
    try:
        record = json.loads(read_bytes(directory / JOURNAL))
    except (OSError, ValueError, RecursionError):
        return None
    entries = record.get("files") if isinstance(record, dict) else None
    sound = isinstance(entries, dict) and all(isinstance(entry, dict) for entry in entries.values())
    return record if sound else None


def _journal_settled(look: Status, wanted: str) -> bool:
    if wanted == "original":
        return not (look.directory / JOURNAL).exists()
    return look.journal is None or look.journal.get("state") == "applied"


def _close_journal(look: Status, wanted: str) -> None:
    path = look.directory / JOURNAL
    try:
        if wanted == "original":
            path.unlink()
        else:
            replace(path, _as_json({**(look.journal or {}), "state": "applied"}))
    except OSError as error:
        raise PatchError(
            f"All files in {look.directory} are {wanted}, but {path} could not be updated: {error}. Fix that and "
            "run the same command again; only the journal is left to write."
        ) from error


def _own_version() -> str:
    try:
        return importlib.metadata.version("ddpshim")
    except importlib.metadata.PackageNotFoundError:
        return "from a checkout"


def _stated_version(directory: Path) -> Optional[str]:
    """Return the package's own ``__version__``, read as text; only for messages and ties between near sets."""
    init = directory / "__init__.py"
    match = re.search(rb"^__version__\s*=\s*['\"]([^'\"]+)", read(init), re.M) if init.is_file() else None
    return match.group(1).decode(errors="replace") if match else None
