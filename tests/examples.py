"""Reads the tables and outputs in examples/README.md for the tests; as a command, measures and replaces them.

Run it: python -m tests.examples [--write] [--only NAME,...]

Each command of the first table runs as written there, in new interpreters. With --write its seconds and its output
replace those in the page.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.preloaded_commands import patience

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "examples" / "README.md"
DEADLINE_S = 300
_ROW = re.compile(r"^\| \[([^]]+)\]\(\1\) \| ([^|]*) \| (?:`([^`]+)`)? *\| *([^|]*?) *\|$", re.MULTILINE)
_PRINTED = "## What they print\n"


@dataclass(frozen=True)
class Row:
    """A line of a table: `last` is its last column."""

    file: str
    shows: str
    command: str
    last: str


def rows(page: str) -> list[list[Row]]:
    """Return the tables of the page: measured examples, then the others."""
    tables = page.split(_PRINTED)[0].split("|---|\n")[1:]
    return [[Row(*(part or "" for part in row)) for row in _ROW.findall(table)] for table in tables]


def printed(output: str) -> str:
    """Return an example's own output: the lines after the last one of ddpshim, torchrun, robomimic or a progress bar,
    without what ddpshim says at the end of a run."""
    lines = output.rstrip("\n").split("\n")
    while lines and lines[-1].startswith("ddpshim: "):
        lines.pop()
    begins = "ddpshim: ", "*****", "ROBOMIMIC", ")"
    others = [i for i, line in enumerate(lines) if line.startswith(begins) or "it/s]" in line]
    return "\n".join(line.rstrip() for line in lines[others[-1] + 1 if others else 0 :])


def shown(page: str) -> dict[str, str]:
    blocks = re.findall(r"```\n\$ ([^\n]+)\n(.*?)\n```", page.split(_PRINTED)[1], re.DOTALL)
    return dict(blocks)


def run(command: str, folder: Path) -> tuple[str, float, float]:
    """Run a command of the page in `folder`; return its output, its seconds, and all its processes' CPU seconds."""
    (folder / "examples").symlink_to(ROOT / "examples")
    words = [sys.executable if word == "python" else word for word in command.split()]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ran = subprocess.run(
        words, cwd=folder, env=environ, stdout=subprocess.PIPE, timeout=patience(DEADLINE_S), text=True, check=True
    )
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return printed(ran.stdout), wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def written(page: str, found: dict[str, tuple[str, float, float]]) -> str:
    """Return the page with the times and outputs in `found`, by command, in place of the old ones."""
    blocks = shown(page)
    for row in rows(page)[0]:
        if row.command in found:
            output, wall, cpu = found[row.command]
            start = page.split(f"`{row.command}` |")[0]
            page = f"{start}`{row.command}` | {wall:.0f} ({cpu:.0f}) |\n" + page[len(start) :].split("\n", 1)[1]
            blocks[row.command] = output
    ordered = [row.command for row in rows(page)[0] if row.command in blocks]
    text = "\n\n".join(f"```\n$ {command}\n{blocks[command]}\n```" for command in ordered)
    return f"{page.split(_PRINTED)[0]}{_PRINTED}\n{text}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into examples/README.md")
    parser.add_argument("--only", help="files, separated by commas")
    args = parser.parse_args()
    page, found = PAGE.read_text(), {}
    for row in rows(page)[0]:
        if args.only and row.file not in args.only.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            output, wall, cpu = found[row.command] = run(row.command, Path(folder))
        print(f"\n$ {row.command}\n{output}\n({wall:.0f} s, {cpu:.0f} s of CPU)", flush=True)
    if args.write:
        PAGE.write_text(written(page, found))


if __name__ == "__main__":
    main()
