"""Parses the sub-commands of `python -m ddpshim patch`, and prints their results. Needs no torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpshim.arguments import Commands
    from ddpshim.trainers.patching.files import Status


def add(commands: Commands) -> None:
    """Add `patch` to the commands of a parser. Local."""
    text = "patch an installed trainer to use ddpshim, or undo that"
    patch = commands.add_parser("patch", help=text, description=text, is_group=True)
    actions = patch.add_subparsers(metavar="ACTION", required=True)
    text = "list ddpshim's patch sets"
    listing = actions.add_parser("list", help=text, description=text)
    listing.add_argument("--json", action="store_true", help="for programs")
    listing.set_defaults(run=_list)
    for name, run, text in (
        ("status", _status, "print which set fits the target, and the state of each file"),
        ("check", _check, "check whether apply would work, without changing anything"),
        ("apply", _apply, "patch all files of the target, or none"),
        ("revert", _revert, "restore the original files, byte for byte"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "--target",
            default="robomimic",
            metavar="PACKAGE|PATH",
            help="an installed package, or a folder that is or contains it (default: %(default)s)",
        )
        action.add_argument("--set", metavar="NAME", help="use this set, e.g. robomimic/0.3.0")
        action.add_argument("--json", action="store_true", help="for programs")
        action.set_defaults(run=run)
    manifest = actions.add_parser("manifest", help="for maintainers: write manifest.json from an unpatched tree")
    manifest.add_argument("directory", type=Path, metavar="DIR", help="patches/CODEBASE/VERSION")
    manifest.add_argument("--source", type=Path, required=True, help="folder that contains the package folder")
    manifest.add_argument("--base", required=True, help="the commit or release of SOURCE")
    text = "patches of another release that also fit SOURCE (default: those in the manifest)"
    manifest.add_argument("--borrow", nargs="+", type=Path, metavar="PATCH", help=text)
    manifest.set_defaults(run=_manifest)


def _list(arguments: argparse.Namespace) -> int:
    from ddpshim.trainers.patching.patchset import load_sets

    if arguments.json:
        sets = [{"set": s.name, "base": s.base, "files": [*s.files], "patches": [*s.patches]} for s in load_sets()]
        print(json.dumps(sets, indent=2))
        return 0
    for patch_set in load_sets():
        hunks = [hunk for diffs in patch_set.patches.values() for diff in diffs for hunk in diff.hunks]
        num_added = sum(len(hunk.new) - hunk.num_same for hunk in hunks)
        num_removed = sum(len(hunk.old) - hunk.num_same for hunk in hunks)
        print(
            f"{patch_set.name}  {num_added + num_removed} changed lines (+{num_added} -{num_removed}) "
            f"in {len(patch_set.files)} files, for {patch_set.base}"
        )
        for patch, diffs in patch_set.patches.items():
            print(f"  {patch}  {', '.join(diff.path for diff in diffs)}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from ddpshim.trainers.patching.files import status

    _print_status(status(arguments.target, arguments.set), arguments.json)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from ddpshim.trainers.patching.files import check

    found, changed = check(arguments.target, arguments.set)
    if arguments.json:
        _print_status(found, True, changed)
        return 0
    would = f"would change {len(changed)} files" if changed else "already applied"
    print(f"{found.patch_set.name} in {found.directory}: {would}")
    return 0


def _apply(arguments: argparse.Namespace) -> int:
    from ddpshim.trainers.patching.files import apply

    found, changed = apply(arguments.target, arguments.set)
    if not arguments.json:
        print(f"{found.patch_set.name}: {'applied' if changed else 'already applied, nothing to do'}")
    _print_status(found, arguments.json, changed)
    return 0


def _revert(arguments: argparse.Namespace) -> int:
    from ddpshim.trainers.patching.files import revert

    found, changed = revert(arguments.target, arguments.set)
    if not arguments.json:
        print(f"{found.patch_set.name}: {'reverted' if changed else 'not applied, nothing to do'}")
    _print_status(found, arguments.json, changed)
    return 0


def _manifest(arguments: argparse.Namespace) -> int:
    from ddpshim.trainers.patching.patchset import build_manifest

    manifest = build_manifest(arguments.directory, arguments.source, arguments.base, arguments.borrow)
    print(f"{arguments.directory / 'manifest.json'}: {len(manifest['patches'])} patches")
    for name, hashes in manifest["files"].items():
        print(f"  {hashes['original'][:12]} -> {hashes['patched'][:12]}  {name}")
    return 0


def _print_status(found: Status, as_json: bool, changed: tuple[str, ...] = ()) -> None:
    """Print a status; `changed`: the files that were changed, or for `check` would be."""
    if as_json:
        files = [{"name": file.name, "state": file.state, "sha256": file.sha256} for file in found.files]
        about = {"set": found.patch_set.name, "directory": str(found.directory), "state": found.state}
        print(json.dumps({**about, "files": files, "changed": changed, "journal": found.journal}, indent=2))
        return
    print(f"{found.patch_set.name} in {found.directory}: {found.state}")
    for file in found.files:
        print(f"  {file.state:8}  {file.sha256[:12]:12}  {file.name}{'  (CRLF)' if file.crlf else ''}")
    if found.journal is not None:
        print(
            f"  journal: {found.journal.get('state')} {found.journal.get('set')} at "
            f"{found.journal.get('time')} by ddpshim {found.journal.get('ddpshim')}"
        )
    if found.state == "unknown":
        print("  no set fits; `python -m ddpshim patch check` says why and what to do")
