"""Reads patch sets, and applies, reverts and reports the one that fits a package: `python -m ddpshim patch`.

``patches/<codebase>/<version>/`` has unified diffs and ``manifest.json``, with the sha256 of every target file before
and after. Only these hashes decide what is written. Of sets that do not fit, the nearest is the one whose lines are
found most; a version string is printed, and breaks ties.

Diffs are read strictly and applied exactly: no fuzz, no offset, both directions. They are bytes, so that encodings and
line endings stay unchanged. GNU patch and ``git apply`` are not used: the first moves a hunk to another place where it
fits, the second can exit 0 without changing anything.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ddpshim import adapters
from ddpshim.errors import PatchError, TargetError
from ddpshim.reading import read_bytes

_FILE = re.compile(rb"--- a/([^\t\n]+)[^\n]*\n\+\+\+ b/\1(?:\t[^\n]*)?\n")
# Parts of a diff: where it begins after prose, what precedes the hunks of a file, a hunk, a line of one. A line without
# newline means that the patch file was cut off: for a file that ends so, there is a "\\ No newline" line.
_START = re.compile(rb"^(?:diff |--- .*\n\+\+\+ )", re.MULTILINE)
_HEADER, _OF_GIT = re.compile(rb"--- .*\n\+\+\+ .*\n?"), re.compile(rb"(?:diff|index) .*\n?")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@.*\n?")
_OF_HUNK = re.compile(rb"([ +-])(.*\n)(\\.*\n?)?")
_WORDS = {"original": "not applied", "patched": "applied"}


class Hunk(NamedTuple):
    """Replaces the lines `old` of the file `path`, from index `at` (from 0) of the original, by `new`."""

    path: str  # without the ``a/`` and ``b/``
    at: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


class PatchSet(NamedTuple):
    """One folder of diffs. `name` is ``codebase/version``, `package` the top folder of all its files."""

    name: str
    version: str
    base: str
    package: str
    patches: Mapping[str, tuple[Hunk, ...]]
    files: Mapping[str, Mapping[str, str]]  # of each, sha256 by state: original, patched


def default_patches_root() -> Path:
    """Return the folder of patch sets: package data of a wheel, else beside the package in a checkout."""
    here = Path(__file__).resolve().parents[1]  # of ddpshim
    return here / "patches" if (here / "patches").is_dir() else here.parent / "patches"


def load_sets() -> tuple[PatchSet, ...]:
    """Return every patch set of ddpshim and of adapters, by name.

    Raises PatchError if one is malformed, or a root has none.
    """
    offers = (adapters.function(package, "patch_sets") for package in adapters.packages())
    roots = [default_patches_root(), *(offer() for offer in offers if offer is not None)]
    folders = []
    for root in roots:
        found = sorted({path.parent for path in [*root.glob("*/*/manifest.json"), *root.glob("*/*/*.patch")]})
        if not found:
            raise TargetError(
                f"No patch set under {root}; there is nothing to apply. Install ddpshim, or the package that offers "
                "that folder, from a wheel or a full checkout."
            )
        folders += found
    return tuple(_load_set(folder) for folder in folders)


def build_manifest(patch_dir: Path, source_root: Path, base: str, borrowed: Sequence[Path] = ()) -> dict[str, Any]:
    """Write and return ``manifest.json`` for the diffs in `patch_dir`, from an unpatched tree. For maintainers.

    `source_root` contains the package folder. `base` is free text that names the commit or release. `borrowed`: patches
    of another set that also fit this release, at other lines. Raises PatchError if a diff does not fit the tree, or a
    file cannot be read or written.
    """
    patches = _read_patches(patch_dir, [os.path.relpath(path, patch_dir).replace(os.sep, "/") for path in borrowed])
    if not patches:
        no_folder = "" if patch_dir.is_dir() else ", which is not a folder"
        raise TargetError(f"No *.patch in {patch_dir}{no_folder}; the set would change nothing. Put diffs there first.")
    files: dict[str, dict[str, str]] = {}
    for name in _targets(patches):
        content = read(source_root / name)
        changed, lacking = transform(patches, name, content, "patched")
        if lacking:
            raise PatchError(
                f"{lacking[0]}; the hunk would change the wrong code. Nothing was changed; use the content that the "
                "diff was made from."
            )
        files[name] = {"original": sha256(content), "patched": sha256(changed)}
    codebase, version = patch_dir.resolve().parts[-2:]
    manifest = {"codebase": codebase, "version": version, "base": base, "patches": [*patches], "files": files}
    where = patch_dir / "manifest.json"
    try:
        where.unlink(missing_ok=True)  # a pipe would wait for a reader
        where.write_text(json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        raise TargetError(
            f"{where} cannot be written ({error}); the set could not be used. Make the folder writable."
        ) from error
    return manifest


def transform(
    patches: Mapping[str, tuple[Hunk, ...]], name: str, content: bytes, wanted: str, *, is_moved: bool = False
) -> tuple[bytes, list[str]]:
    """Return `content` of the file `name` with all its hunks applied (`wanted` patched) or reversed (original). Local.

    And a line for each hunk that was not found at its place. `is_moved`: the file is of no release; a hunk is found if
    its old lines occur exactly once, at any place, as one of another set's patches always is.
    """
    lines, lacking = _split(content), list[str]()
    # Of each patch the last hunk first: so none has moved the lines of another.
    hunks = [(patch, hunk) for patch, held in patches.items() for hunk in reversed(held) if hunk.path == name]
    for patch, hunk in hunks if wanted == "patched" else reversed(hunks):
        old, new = (hunk.old, hunk.new) if wanted == "patched" else (hunk.new, hunk.old)
        is_anywhere = is_moved or "/" in patch
        asked = range(len(lines) - len(old) + 1) if is_anywhere else [hunk.at][: hunk.at <= len(lines)]
        places = [place for place in asked if tuple(lines[place : place + len(old)]) == old]
        if is_anywhere and not old:
            lacking.append(f"{name}, {patch}, line {hunk.at}: has no unchanged line to find it by; place it by hand")
        elif len(places) != 1:
            first = next((line.strip() for line in old if line.strip()), b"")
            where = f"at lines {', '.join(str(place + 1) for place in places)}" if places else "nowhere"
            where = where if is_anywhere else f"not there, in a file of {len(lines)} lines"
            what = f"{_show(first)} and the lines after it occur {where}"
            lacking.append(f"{name}, {patch}, line {hunk.at + 1}: {what}")
        else:
            lines[places[0] : places[0] + len(old)] = new
    if any(not line.endswith(b"\n") for line in lines[:-1]):
        lacking.append(f"{name}: a line without a newline is followed by another, which would join the two")
    return b"".join(lines), lacking


def _load_set(folder: Path) -> PatchSet:
    where = folder / "manifest.json"
    cure = f"Run `python -m ddpshim patch manifest {folder} --source ROOT --base TEXT`, or reinstall ddpshim."
    try:
        manifest = json.loads(read(where))
        patches = _read_patches(folder, [name for name in manifest["patches"] if "/" in name])
        listed, base = manifest["patches"], str(manifest["base"])
        files = {str(name): {state: h[state] for state in _WORDS} for name, h in manifest["files"].items()}
        codebase, version = str(manifest["codebase"]), str(manifest["version"])
    except (PatchError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PatchError(f"{where} is not a manifest ({error!r:.200}); the set cannot be trusted. {cure}") from error
    packages = {name.split("/")[0] for name in files}
    if (
        listed != list(patches)
        or set(files) != set(_targets(patches))
        or (codebase, version) != folder.resolve().parts[-2:]
        or len(packages) != 1
        or any(hashes["original"] == hashes["patched"] for hashes in files.values())
    ):
        raise PatchError(
            f"{where} does not describe the diffs beside it (their names, their target files in one package, "
            f"the folder's name, two hashes for each file); the set cannot be trusted. {cure}"
        )
    return PatchSet(f"{codebase}/{version}", version, base, packages.pop(), patches, files)


def _read_patches(folder: Path, borrowed: Sequence[str]) -> dict[str, tuple[Hunk, ...]]:
    """Return the hunks of each patch by its name (of another set: its relative path), in the order of file names."""
    names = [*(path.name for path in folder.glob("*.patch")), *borrowed]
    ordered = sorted(names, key=lambda name: name.rpartition("/")[2])
    return {name: parse_diff(read(folder / name), str(folder / name)) for name in ordered}


def _targets(patches: Mapping[str, tuple[Hunk, ...]]) -> list[str]:
    return sorted({hunk.path for hunks in patches.values() for hunk in hunks})


def read(path: Path) -> bytes:
    """Return the content of a file; raises TargetError if it cannot be read."""
    try:
        return read_bytes(path)
    except OSError as error:
        raise TargetError(
            f"Could not read {path}: {error}. Nothing was done. Check the path and the permissions."
        ) from error


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Diffs


def parse_diff(text: bytes, name: str) -> tuple[Hunk, ...]:
    """Return the hunks of one patch file in order; free text (a DEP-3 header) may precede the first.

    `name` is for messages. Raises PatchError with the line number if the text is not a well-formed diff of existing
    files: wrong counts, a path that leaves the tree, a rename or mode change. (The manifest's hashes show the rest.)
    """
    start = _START.search(text)
    at = len(text) if start is None else start.start()
    found, paths = list[Hunk](), list[str]()
    try:
        while at < len(text):
            if match := _HEADER.match(text, at):
                paths.append(_path(match.group()))
            elif paths and (match := _HUNK.match(text, at)):
                first, num_old, num_new = (1 if number is None else int(number) for number in match.groups())
                old, new = list[bytes](), list[bytes]()
                while (len(old), len(new)) != (num_old, num_new):
                    at = match.end()
                    match = _OF_HUNK.match(text, at)
                    if match is None or len(old) > num_old or len(new) > num_new:
                        raise ValueError(f"the hunk counts {num_old},{num_new} lines but has {len(old)},{len(new)}")
                    tag, line, is_cut = match.groups()
                    line = line[: -len(b"\n")] if is_cut else line
                    if tag != b"+":
                        old.append(line)
                    if tag != b"-":
                        new.append(line)
                # With a count of 0, the header names the line *before* the gap, otherwise the first line itself.
                found.append(Hunk(paths[-1], first - (num_old > 0), tuple(old), tuple(new)))
            elif (match := _OF_GIT.match(text, at)) is None:
                raise ValueError(
                    f"{_show(_split(text[at:])[0])} is neither a hunk, a file header nor inside a hunk's counts "
                    "(renames, mode changes, new and deleted files are not for patch sets)"
                )
            at = match.end()
        if not paths or sorted({hunk.path for hunk in found}) != sorted(paths):
            raise ValueError("no `--- a/…` and `+++ b/…` pair found, one without a hunk, or two for one file")
    except ValueError as error:
        raise PatchError(
            f"{name} line {len(_split(text[:at])) + 1}: {error}; applying it would be a guess. Make the patch again "
            "with `diff -u` from the two files."
        ) from None
    return tuple(found)


def _path(header: bytes) -> str:
    """Return the path in the two lines before the hunks of a file. Raises ValueError if it is not one in the tree."""
    match = _FILE.fullmatch(header)
    path = "" if match is None else match.group(1).decode(errors="replace")
    parts = path.split("/")
    if len(parts) < 2 or not all(part.strip(".") for part in parts) or "\\" in path:
        raise ValueError(f"{_show(header)} is not `--- a/PACKAGE/FILE` and `+++ b/` the same, inside the tree")
    return path


def _split(content: bytes) -> list[bytes]:
    """Return lines with their newline, split at LF only: `bytes.splitlines` would also split at a lone CR."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def _show(line: bytes) -> str:
    return repr(line.decode(errors="replace"))


# What a package has


class FileStatus(NamedTuple):
    """One target file: `state` is original, patched, unknown or missing; `path` is without symlinks."""

    name: str
    path: Path
    state: str
    sha256: str
    content: bytes = b""


class Status(NamedTuple):
    """The state of one package folder with respect to one patch set."""

    patch_set: PatchSet
    directory: Path
    files: tuple[FileStatus, ...]
    changed: tuple[str, ...] = ()  # of `apply` and `revert`: the files that were changed, or would be

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
    found = looks(directory, chosen)
    fitting = [look for look in found if look.state != "unknown"]
    if any(look.patch_set.files != fitting[0].patch_set.files for look in fitting):
        names = ", ".join(sorted(look.patch_set.name for look in fitting))
        raise PatchError(f"{directory} matches several different sets ({names}). Choose one with --set.")
    return found[0]


def looks(directory: Path, sets: Sequence[PatchSet]) -> list[Status]:
    """Return the status of the package in `directory` for each set: those that fit first, then the nearest. Local."""
    found, stated = [_look_at(patch_set, directory) for patch_set in sets], _stated_version(directory)

    def distance(look: Status) -> tuple[Any, ...]:
        unknown = [file for file in look.files if file.state == "unknown"]
        patches = look.patch_set.patches
        lacking = sum(len(transform(patches, f.name, f.content, "patched", is_moved=True)[1]) for f in unknown)
        return look.state == "unknown", -look.num_known, lacking, look.patch_set.version != stated

    return sorted(found, key=distance)


def apply(target: str = "robomimic", set_name: Optional[str] = None) -> Status:
    """Patch the package, all files or none; `changed` is empty if it already was patched. Completes a partial apply.

    Files are replaced through a temporary file, never written in place: package managers hard-link
    installed files to a cache that other environments share. Safe if a second process does the same: each file has
    its previous content or all of the new one. Raises PatchError, with nothing changed, if a file is unknown or cannot
    be replaced.
    """
    return _turn("patched", target, set_name)


def revert(target: str = "robomimic", set_name: Optional[str] = None) -> Status:
    """Restore the original files, byte for byte, by reversing the diffs. Otherwise like `apply`."""
    return _turn("original", target, set_name)


def _turn(wanted: str, target: str, set_name: Optional[str], writes: bool = True) -> Status:
    look = status(target, set_name)
    if look.state == "unknown":
        raise PatchError(_refusal(look))
    changes = [(file, turned(look.patch_set, file, wanted)) for file in look.files if file.state != wanted]
    if writes:
        _write(look.directory, changes)
    return _look_at(look.patch_set, look.directory)._replace(changed=tuple(file.name for file, _ in changes))


def turned(patch_set: PatchSet, file: FileStatus, wanted: str) -> bytes:
    """Return the content of `file` in the wanted state. Local.

    Raises PatchError if the result does not have the manifest's hash.
    """
    if file.state == wanted:
        return file.content
    content, _ = transform(patch_set.patches, file.name, file.content, wanted)
    found, expected = sha256(content), patch_set.files[file.name][wanted]
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
        state = next((state for state, digest in hashes.items() if digest == found), "unknown")
        files.append(FileStatus(name, path, state, found, content))
    return Status(patch_set, directory, tuple(files))


def _refusal(look: Status) -> str:
    """Return the message for a package that no set fits: the state of every file, and what to do."""
    patch_set, stated = look.patch_set, _stated_version(look.directory)
    files = "".join(f"\n  {file.name}: {file.state}" for file in look.files)
    return (
        f"{look.directory} is not a release that ddpshim knows; patching it would mix releases or overwrite "
        f"edits, so nothing was changed. Nearest set: {patch_set.name} ({look.num_known} of "
        f"{len(look.files)} files match; the package calls itself {stated or 'nothing'}).{files}\n"
        "In a fork, merge the set by `git merge-file` (`python -m ddpshim docs MIGRATION`, section 2). If another "
        "version of ddpshim has patched it, revert with that version. Otherwise undo your edits, or get "
        f"{patch_set.package} again ({patch_set.base}), and retry. If you changed nothing, open an issue at ddpshim "
        "with what `python -m ddpshim patch status` prints."
    )


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
            prefix = f".{file.path.name}.ddpshim-"
            with tempfile.NamedTemporaryFile(dir=file.path.parent, prefix=prefix, delete=False) as stream:
                staged.append(stream.name)
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            shutil.copymode(file.path, stream.name)
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
    for folder in (*(path / package for package in packages), path):
        if folder.name in packages and folder.is_dir():
            return folder.name, folder
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
    patch = commands.add_parser("patch", help=text, description=text, example="status")
    actions = patch.add_subparsers(metavar="ACTION", required=True)
    for name, text in (
        ("status", "print which set fits the target, and the state of each file"),
        ("check", "check whether apply would work, without changing anything"),
        ("apply", "patch all files of the target, or none"),
        ("revert", "restore the original files, byte for byte"),
    ):
        action = actions.add_parser(name, help=text, description=text, example="--target robomimic")
        action.add_argument(
            "--target",
            default="robomimic",
            metavar="PACKAGE|PATH",
            help="an installed package, or a folder that is or contains it (default: %(default)s)",
        )
        action.add_argument("--set", metavar="NAME", help="use this set, e.g. robomimic/0.3.0")
        action.set_defaults(run=_act, action=name)
    text = "for maintainers: write manifest.json from an unpatched tree"
    example = "patches/CODEBASE/VERSION --source CODEBASE-VERSION --base VERSION"
    manifest = actions.add_parser("manifest", help=text, description=text, example=example)
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
        found = _turn("patched", target, set_name, writes=False)
        would = f"would change {len(found.changed)} files" if found.changed else "already applied"
        print(f"{found.patch_set.name} in {found.directory}: {would}")
    else:
        is_apply = arguments.action == "apply"
        found = (apply if is_apply else revert)(target, set_name)
        done, already = ("applied", "already applied") if is_apply else ("reverted", "not applied")
        print(f"{found.patch_set.name}: {done if found.changed else f'{already}, nothing to do'}")
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
