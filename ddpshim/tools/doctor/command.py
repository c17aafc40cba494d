"""Parses the command line of `python -m ddpshim doctor` and prints the findings. Does not import torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddpshim.job.say import say

if TYPE_CHECKING:
    from ddpshim.arguments import Commands


def add(commands: Commands) -> None:
    """Add the command `doctor` to a parser. Local."""
    doctor = commands.add_parser(
        "doctor",
        help="find what would break in a trainer on several ranks, without running it",
        description="Read a trainer, or all trainers in a folder, and list what would hang, or silently train "
        "something else, on several ranks. Exit code: 0 nothing found except notes, 1 findings, 2 wrong usage, "
        "an unreadable path, or no trainer in it.",
    )
    doctor.add_argument("path", type=Path, nargs="?", metavar="PATH", help="a file or a folder")
    shape = doctor.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="for programs")
    shape.add_argument("--explain", type=_codes, metavar="CODE", help="explain a code, with an example and a fix")
    shape.add_argument("--fix", action="store_true", help="print the mechanical fixes as a diff, for `patch -p1`")
    doctor.add_argument(
        "--select", type=_codes, default=[], metavar="CODES", help="report only these codes, e.g. DDP203,DDP4"
    )
    doctor.add_argument("--ignore", type=_codes, default=[], metavar="CODES", help="report all codes except these")
    doctor.add_argument(
        "--exclude", action="append", default=[], metavar="NAME", help="a file or folder to skip; may be repeated"
    )
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from ddpshim.tools.doctor.checking import check
    from ddpshim.tools.doctor.findings import CODES
    from ddpshim.tools.pages import text_of

    if arguments.explain:
        wanted = (code for code in CODES if code.startswith(tuple(arguments.explain)))
        print("\n".join(map(text_of, wanted)), end="")
        return 0
    if arguments.path is None:
        say("PATH is missing; nothing was checked. Name a trainer, or a folder that contains trainers.")
        return 2
    try:
        report = check(arguments.path, select=arguments.select, ignore=arguments.ignore, exclude=arguments.exclude)
    except OSError as error:
        say(f"{error}; nothing was checked. Name a file or folder that can be read.")
        return 2
    if arguments.fix:
        sys.stdout.buffer.write(report.diff())
        print(report.as_text(), file=sys.stderr)
    else:
        print(json.dumps(report.as_json(), indent=2) if arguments.json else report.as_text())
    is_bad = any(finding.severity != "note" for finding in report.findings)
    return 1 if is_bad else 0 if report.num_programs else 2


def _codes(text: str) -> list[str]:
    from ddpshim.tools.doctor.findings import CODES

    out = [code.strip() for code in text.split(",") if code.strip()]
    for code in out:
        if not any(known.startswith(code) for known in CODES):
            raise argparse.ArgumentTypeError(f"no code begins with {code!r}; codes are {', '.join(CODES)}")
    return out
