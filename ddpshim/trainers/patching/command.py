"""Parses the sub-commands of `python -m ddpshim patch`, and prints their results. Needs no torch."""

from __future__ import annotations

import argparse
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
    for name, run, text in (
        ("status", _status, "print which set fits the target, and the state of each file"),
        ("check", _check, "check whether apply would work, without changing anything"),
        ("apply", _turn, "patch all files of the target, or none"),
        ("revert", _turn, "restore the original files, byte for byte"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "--target",
            default="robomimic",
            metavar="PACKAGE|PATH",
            help="an installed package, or a folder that is or contains it (default: %(default)s)",
        )
        action.add_argument("--set", metavar="NAME", help="use this set, e.g. robomimic/0.3.0")
        action.set_defaults(run=run, wanted="applied" if name == "apply" else "reverted")
    manifest = actions.add_parser("manifest", help="for maintainers: write manifest.json from an unpatched tree")
    manifest.add_argument("directory", type=Path, metavar="DIR", help="patches/CODEBASE/VERSION")
    manifest.add_argument("--source", type=Path, required=True, help="folder that contains the package folder")
    manifest.add_argument("--base", required=True, help="the commit or release of SOURCE")
    text = "patches of another release that also fit SOURCE"
    manifest.add_argument("--borrow", nargs="+", type=Path, default=[], metavar="PATCH", help=text)
    manifest.set_defaults(run=_manifest)


def _status(arguments: argparse.Namespace) -> int:
    from ddpshim.trainers.patching.files import status

    _print_status(status(arguments.target, arguments.set))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from ddpshim.trainers.patching.files import check

    found, changed = check(arguments.target, arguments.set)
    would = f"would change {len(changed)} files" if changed else "already applied"
    print(f"{found.patch_set.name} in {found.directory}: {would}")
    return 0


def _turn(arguments: argparse.Namespace) -> int:
    from ddpshim.trainers.patching import files

    turn = files.apply if arguments.wanted == "applied" else files.revert
    found, changed = turn(arguments.target, arguments.set)
    already = "already applied" if arguments.wanted == "applied" else "not applied"
    print(f"{found.patch_set.name}: {arguments.wanted if changed else f'{already}, nothing to do'}")
    _print_status(found)
    return 0


def _manifest(arguments: argparse.Namespace) -> int:
    from ddpshim.trainers.patching.patchset import build_manifest

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
