"""Reads patch sets from disk: ``patches/<codebase>/<version>/`` with unified diffs and their manifest.

``manifest.json`` has the sha256 of every target file before and after. No function here reads an installed target.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ddpshim import adapters
from ddpshim.errors import PatchError, TargetError
from ddpshim.reading import read_bytes
from ddpshim.trainers.patching.unidiff import FileDiff, apply_diff, apply_where_found, parse_diff


class Hashes(NamedTuple):
    """sha256 of one file."""

    original: str
    patched: str


@dataclass(frozen=True)
class PatchSet:
    """One folder of diffs. `name` is ``codebase/version``, `package` the top folder of all its files."""

    name: str
    codebase: str
    version: str
    base: str
    package: str
    patches: Mapping[str, tuple[FileDiff, ...]]
    files: Mapping[str, Hashes]


def default_patches_root() -> Path:
    """Return the folder of patch sets: package data of a wheel, else beside the package in a checkout."""
    here = Path(__file__).resolve().parents[2]  # of ddpshim
    return here / "patches" if (here / "patches").is_dir() else here.parent / "patches"


def load_sets(patches_root: Optional[Path] = None) -> tuple[PatchSet, ...]:
    """Return every patch set under `patches_root`, by name; by default ddpshim's own and those of adapters.

    Raises PatchError if one is malformed, or a root has none.
    """
    roots = [patches_root] if patches_root is not None else [default_patches_root()]
    if patches_root is None:
        offers = (adapters.function(package, "patch_sets") for package in adapters.packages())
        roots += [offer() for offer in offers if offer is not None]
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
    files: dict[str, Hashes] = {}
    for name in _targets(patches):
        content = read(source_root / name)
        files[name] = Hashes(sha256(content), sha256(transform(patches, name, content, "patched")))
    codebase, version = patch_dir.resolve().parts[-2:]
    manifest = {
        "codebase": codebase,
        "version": version,
        "base": base,
        "patches": [*patches],
        "files": {name: hashes._asdict() for name, hashes in files.items()},
    }
    where = patch_dir / "manifest.json"
    try:
        where.unlink(missing_ok=True)  # a pipe would wait for a reader
        where.write_text(json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        raise TargetError(
            f"{where} cannot be written ({error}); the set could not be used. Make the folder writable."
        ) from error
    return manifest


def transform(patches: Mapping[str, tuple[FileDiff, ...]], name: str, content: bytes, wanted: str) -> bytes:
    """Return `content` of the file `name` with all its diffs applied (`wanted` patched) or reversed (original)."""
    diffs = [diff for patch in patches.values() for diff in patch if diff.path == name]
    for diff in diffs if wanted == "patched" else reversed(diffs):
        content = apply_diff(diff, content, reverse=wanted == "original")
    return content


def transform_moved(patches: Mapping[str, tuple[FileDiff, ...]], name: str, content: bytes) -> tuple[bytes, list[str]]:
    """Return the content with each hunk applied whose lines occur exactly once in the file `name`, and other hunks.

    Local. The other hunks are a line each, that says why.
    """
    odd = []
    for patch, diffs in patches.items():
        for diff in (diff for diff in diffs if diff.path == name):
            content, problems = apply_where_found(diff, content)
            odd += [f"{patch}, {problem}" for problem in problems]
    return content, odd


def _load_set(folder: Path) -> PatchSet:
    where = folder / "manifest.json"
    cure = f"Run `python -m ddpshim patch manifest {folder} --source ROOT --base TEXT`, or reinstall ddpshim."
    try:
        manifest = json.loads(read(where))
        patches = _read_patches(folder, [name for name in manifest["patches"] if "/" in name])
        listed, base = manifest["patches"], str(manifest["base"])
        files = {str(name): Hashes(h["original"], h["patched"]) for name, h in manifest["files"].items()}
        codebase, version = str(manifest["codebase"]), str(manifest["version"])
    except (PatchError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PatchError(f"{where} is not a manifest ({error!r:.200}); the set cannot be trusted. {cure}") from error
    packages = {name.split("/")[0] for name in files}
    if (
        listed != list(patches)
        or set(files) != set(_targets(patches))
        or (codebase, version) != folder.resolve().parts[-2:]
        or len(packages) != 1
        or any(hashes.original == hashes.patched for hashes in files.values())
    ):
        raise PatchError(
            f"{where} does not describe the diffs beside it (their names, their target files in one package, "
            f"the folder's name, two hashes for each file); the set cannot be trusted. {cure}"
        )
    return PatchSet(f"{codebase}/{version}", codebase, version, base, packages.pop(), patches, files)


def _read_patches(folder: Path, borrowed: Sequence[str]) -> dict[str, tuple[FileDiff, ...]]:
    """Return the diffs of each patch, in the order of file names.

    Keys: the file name, or the relative path for a patch of another set.
    """
    names = [*(path.name for path in folder.glob("*.patch")), *borrowed]
    patches = {}
    for name in sorted(names, key=lambda name: name.rpartition("/")[2]):
        diffs = parse_diff(read(folder / name), str(folder / name))
        is_own = "/" not in name
        patches[name] = tuple(diff if is_own else replace(diff, is_at_home=False) for diff in diffs)
    return patches


def _targets(patches: Mapping[str, tuple[FileDiff, ...]]) -> list[str]:
    return sorted({diff.path for diffs in patches.values() for diff in diffs})


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
