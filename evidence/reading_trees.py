"""How often `check --read` is right on public trainers: `python -m evidence.reading_trees DIR` reads the trees in DIR.

evidence/reading_trees.txt has each tree's name, commit and whether a rule was changed because of it ("fitted") or not
("held-out", except that DDP301 was changed because of eai-vc, where it finds nothing now), and below it each finding
with a reader's verdict. true: on several ranks the trainer would do what the message says; a race counts. false: it
would not, or nobody starts that program on several ranks. neither: it is arguable, needs a setting that the project's
configs do not have, or a mode that nobody starts on several ranks. A trainer of one process is judged as if it were
about to be moved. DIR holds the trees as OWNER+NAME-COMMIT.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddpshim.tools.check.reading.command import read

FILE = Path(__file__).with_suffix(".txt")


class Judged(NamedTuple):
    """One finding, and whether it is right."""

    tree: str
    is_held_out: bool
    code: str
    place: str  # path:line
    verdict: str


def trees() -> dict[str, bool]:
    """Return OWNER/NAME COMMIT -> whether the tree is held out."""
    heads = [line[5:].rsplit(maxsplit=1) for line in FILE.read_text().splitlines() if line.startswith("tree ")]
    return {name: role == "held-out" for name, role in heads}


def judged() -> Iterator[Judged]:
    """Yield the findings of the data file."""
    held_out, tree = trees(), ""
    for line in FILE.read_text().splitlines():
        if line.startswith("tree "):
            tree = line[5:].rsplit(maxsplit=1)[0]
        else:
            code, place, verdict = line.split()
            yield Judged(tree, held_out[tree], code, place, verdict)


def table() -> list[str]:
    """Return rows `| code | held out: true | false | neither | fitted: ... |`, as docs/check.md has them."""
    counts = Counter((one.code, one.is_held_out, one.verdict) for one in judged())
    codes = sorted({code for code, _, _ in counts})
    columns = [(held_out, verdict) for held_out in (True, False) for verdict in ("true", "false", "neither")]
    return [f"| {code} | " + " | ".join(str(counts[(code, *column)]) for column in columns) + " |" for code in codes]


def main() -> int:
    """Read the trees again, and print the findings that have no verdict (+) and those that are gone (-)."""
    known = {(one.tree, one.code, one.place) for one in judged()}
    found = set()
    for tree in trees():
        folder = Path(sys.argv[1]) / tree.replace("/", "+").replace(" ", "-")
        for one in read(folder.absolute()).findings:
            found.add((tree, one.code, f"{Path(one.path).relative_to(folder.absolute()).as_posix()}:{one.line}"))
    for sign, entries in (("+", found - known), ("-", known - found)):
        print(*(f"{sign} {' '.join(entry)}" for entry in sorted(entries)), sep="\n", end="\n" if entries else "")
    print(*table(), sep="\n")
    return int(found != known)


if __name__ == "__main__":
    sys.exit(main())
