"""Chooses a patch set by the content of files; checks, applies, reverts and reports it: `python -m ddpshim patch`.

Only content hashes decide what is written. Of sets that do not fit, the nearest is the one whose lines are found most;
a version string is printed, and breaks ties.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ddpshim.errors import PatchError, TargetError
from ddpshim.trainers.patch_sets import (
    PatchSet,
    build_manifest,
    load_sets,
    read,
    sha256,
    transform,
    transform_moved,
)

_WORDS = {"original": "not applied", "patched": "applied"}


@dataclass(frozen=True)
class FileStatus:
    """One target file: `state` is original, patched, unknown or missing; `path` is without symlinks."""

    name: str
    path: Path
    state: str
    sha256: str
    content: bytes = b""


@dataclass(frozen=True)
class Status:
    """The state of one package folder with respect to one patch set."""

    patch_set: PatchSet
    directory: Path
    files: tuple[FileStatus, ...]

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
    """The resulting status, and the files that were changed, or would be."""

    status: Status
    changed: tuple[str, ...]


def status(target: str = "robomimic", set_name: Optional[str] = None) -> Status:
    """Return the status of the only set whose files all match, or of the nearest with state ``unknown``; reads only.

    `target` is the name of an installed package (not imported), or a folder that is the package or contains it.
    `set_name` (``robomimic/0.3.0`` or ``0.3.0``) restricts the choice, but all files must still match.
    Raises PatchError if the target or the set is not found, or if two different sets match.
    """
    sets = load_sets()
    package, directory = _find_package(target, sorted({s.package for s in sets}))
    chosen = [s for s in sets if s.package == package and set_name in (None, s.name, s.version)]
    if not chosen:
        raise TargetError(
            f"ddpshim carries no patch set {set_name!r} for {package}; there is nothing to compare "
            f"{directory} with. Use one of: {', '.join(s.name for s in sets)}."
        )
    nearest, *others = looks(directory, chosen)
    fitting = [nearest, *(look for look in others if look.state != "unknown")]
    if nearest.state != "unknown" and any(look.patch_set.files != nearest.patch_set.files for look in fitting):
        names = ", ".join(sorted(look.patch_set.name for look in fitting))
        raise PatchError(f"{directory} matches several different sets ({names}). Choose one with --set.")
    return nearest


def looks(directory: Path, sets: Sequence[PatchSet]) -> list[Status]:
    """Return the status of the package in `directory` for each set: those that fit first, then the nearest. Local."""
    found, stated = [_look_at(patch_set, directory) for patch_set in sets], _stated_version(directory)

    def distance(look: Status) -> tuple[Any, ...]:
        unknown = [file for file in look.files if file.state == "unknown"]
        lacking = sum(len(transform_moved(look.patch_set, file.name, file.content)[1]) for file in unknown)
        return look.state == "unknown", -look.num_known, lacking, look.patch_set.version != stated

    return sorted(found, key=distance)


def apply(target: str = "robomimic", set_name: Optional[str] = None) -> Outcome:
    """Patch the package, all files or none; `changed` is empty if it already was patched. Completes a partial apply.

    Files are replaced through a temporary file, never written in place: package managers hard-link
    installed files to a cache that other environments share. Safe if a second process does the same: each file has
    its previous content or all of the new one. Raises PatchError, with nothing changed, if a file is unknown or cannot
    be replaced.
    """
    return _turn("patched", target, set_name)


def revert(target: str = "robomimic", set_name: Optional[str] = None) -> Outcome:
    """Restore the original files, byte for byte, by reversing the diffs. Otherwise like `apply`."""
    return _turn("original", target, set_name)


def _turn(wanted: str, target: str, set_name: Optional[str], writes: bool = True) -> Outcome:
    look = status(target, set_name)
    if look.state == "unknown":
        raise PatchError(_refusal(look))
    changes = [(file, turned(look.patch_set, file, wanted)) for file in look.files if file.state != wanted]
    names = tuple(file.name for file, _ in changes)
    if not writes:
        return Outcome(look, names)
    _write(look.directory, changes)
    return Outcome(_look_at(look.patch_set, look.directory), names)


def turned(patch_set: PatchSet, file: FileStatus, wanted: str) -> bytes:
    """Return the content of `file` in the wanted state. Local.

    Raises PatchError if the result does not have the manifest's hash.
    """
    if file.state == wanted:
        return file.content
    content = transform(patch_set.patches, file.name, file.content, wanted)
    found, expected = sha256(content), getattr(patch_set.files[file.name], wanted)
    if found != expected:
        raise PatchError(
            f"The diffs of {patch_set.name} turn {file.name} into {found}, but the manifest says {expected}: the "
            "set is damaged, and nothing was changed. Reinstall ddpshim, or rebuild the manifest if you edited a "
            "diff."
        )
    return content


def _look_at(patch_set: PatchSet, directory: Path) -> Status:
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
        state = {hashes.original: "original", hashes.patched: "patched"}.get(found, "unknown")
        files.append(FileStatus(name, path, state, found, content))
    return Status(patch_set, directory, tuple(files))


def _refusal(look: Status) -> str:
    """Return the message for a package that no set fits: the state of every file, and what to do."""
    patch_set, stated = look.patch_set, _stated_version(look.directory)
    lines = [
        f"{look.directory} is not a release that ddpshim knows; patching it would mix releases or overwrite "
        f"edits, so nothing was changed. Nearest set: {patch_set.name} ({look.num_known} of "
        f"{len(look.files)} files match; the package calls itself {stated or 'nothing'}).",
    ]
    lines += [f"  {file.name}: {file.state}" for file in look.files]
    lines.append(
        "In a fork, merge the set by `git merge-file` (`python -m ddpshim docs MIGRATION`, section 2). If another "
        "version of ddpshim has patched it, revert with that version. Otherwise undo your edits, or get "
        f"{patch_set.package} again ({patch_set.base}), and retry. If you changed nothing, open an issue at ddpshim "
        "with what `python -m ddpshim patch status` prints."
    )
    return "\n".join(lines)


def _write(directory: Path, changes: list[tuple[FileStatus, bytes]]) -> None:
    """Replace every file; on an error, restore all of them."""
    try:
        _replace(changes)
    except BaseException as error:
        try:
            _replace([(file, file.content) for file, _ in changes if file.path.read_bytes() != file.content])
        except OSError as another:
            raise PatchError(
                f"Replacing files in {directory} failed ({error}), and so did restoring them ({another}); the package "
                "is partly patched and may not run. Fix the cause, then `python -m ddpshim patch apply` or `revert` "
                "completes it."
            ) from error
        if isinstance(error, OSError):
            raise PatchError(
                f"Could not replace files in {directory}: {error}. A half-patched package would not run, so "
                "all files were restored. Fix the cause (permissions, disk space) and retry."
            ) from error
        raise


def _replace(changes: list[tuple[FileStatus, bytes]]) -> None:
    """Write all new contents to synced files beside the files, with their modes, then rename them into place."""
    staged: list[str] = []
    try:
        for file, content in changes:
            handle, temporary = tempfile.mkstemp(
                dir=file.path.parent, prefix=f".{file.path.name}.", suffix=".ddpshim-tmp"
            )
            staged.append(temporary)
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(handle)
            shutil.copymode(file.path, temporary)
        for (file, _), temporary in zip(changes, staged):
            os.replace(temporary, file.path)
    finally:
        for temporary in staged:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


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


def _stated_version(directory: Path) -> Optional[str]:
    """Return the package's own ``__version__``, read as text; only for messages and ties between near sets."""
    init = directory / "__init__.py"
    match = re.search(rb"^__version__\s*=\s*['\"]([^'\"]+)", read(init), re.M) if init.is_file() else None
    return match.group(1).decode(errors="replace") if match else None


# The command


def add(commands: Any) -> None:
    """Add `patch` to the commands of a parser. Local."""
    text = "patch an installed trainer to use ddpshim, or undo that"
    patch = commands.add_parser("patch", help=text, description=text, is_group=True)
    actions = patch.add_subparsers(metavar="ACTION", required=True)
    for name, text in (
        ("status", "print which set fits the target, and the state of each file"),
        ("check", "check whether apply would work, without changing anything"),
        ("apply", "patch all files of the target, or none"),
        ("revert", "restore the original files, byte for byte"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "--target",
            default="robomimic",
            metavar="PACKAGE|PATH",
            help="an installed package, or a folder that is or contains it (default: %(default)s)",
        )
        action.add_argument("--set", metavar="NAME", help="use this set, e.g. robomimic/0.3.0")
        action.set_defaults(run=_act, action=name)
    manifest = actions.add_parser("manifest", help="for maintainers: write manifest.json from an unpatched tree")
    manifest.add_argument("directory", type=Path, metavar="DIR", help="patches/CODEBASE/VERSION")
    manifest.add_argument("--source", type=Path, required=True, help="folder that contains the package folder")
    manifest.add_argument("--base", required=True, help="the commit or release of SOURCE")
    text = "patches of another release that also fit SOURCE"
    manifest.add_argument("--borrow", nargs="+", type=Path, default=[], metavar="PATCH", help=text)
    manifest.set_defaults(run=_manifest)


def _act(arguments: argparse.Namespace) -> int:
    target, set_name = arguments.target, arguments.set
    if arguments.action == "status":
        _print_status(status(target, set_name))
    elif arguments.action == "check":
        found, changed = _turn("patched", target, set_name, writes=False)
        would = f"would change {len(changed)} files" if changed else "already applied"
        print(f"{found.patch_set.name} in {found.directory}: {would}")
    else:
        is_apply = arguments.action == "apply"
        found, changed = (apply if is_apply else revert)(target, set_name)
        done, already = ("applied", "already applied") if is_apply else ("reverted", "not applied")
        print(f"{found.patch_set.name}: {done if changed else f'{already}, nothing to do'}")
        _print_status(found)
    return 0


def _manifest(arguments: argparse.Namespace) -> int:
    manifest = build_manifest(arguments.directory, arguments.source, arguments.base, arguments.borrow)
    print(f"{arguments.directory / 'manifest.json'}: {len(manifest['patches'])} patches")
    for name, hashes in manifest["files"].items():
        print(f"  {hashes['original'][:12]} -> {hashes['patched'][:12]}  {name}")
    return 0


def _print_status(found: Status) -> None:
    print(f"{found.patch_set.name} in {found.directory}: {found.state}")
    for file in found.files:
        print(f"  {file.state:8}  {file.sha256[:12]:12}  {file.name}")
    if found.state == "unknown":
        print("  no set fits; `python -m ddpshim patch check` says why and what to do")
