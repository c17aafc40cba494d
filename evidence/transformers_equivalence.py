"""Compares transformers.Trainer on N ranks with one process without a launcher, with dropout.

Run it: python -m evidence.transformers_equivalence [--ranks 2,3] [--write evidence/other_codebases.md]

It needs the environment of requirements/lerobot.txt.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from evidence import pages
from evidence.compare import TIMES_ROUNDING, largest_difference, logs_differ, names_differ, shown
from evidence.lerobot_equivalence import read
from evidence.results import ran

ROOT = Path(__file__).parent.parent
COMMAND = "python -m evidence.transformers_equivalence --write evidence/other_codebases.md"
START = f"<!-- what follows is written by {COMMAND} -->\n"
END = "<!-- end of transformers -->\n"
COLUMNS = ["run", "moved by training", "weights", "nudged weights", "log", "files"]
STEPS, LEFT_AT = 9, 4


def start(folder: Path, name: str, num_ranks: int = 0, nudge: bool = False, *, resumes: bool = False) -> Path:
    """Train in `folder`/`name`, on ranks or in one process; return that folder."""
    variables = {"DDPSHIM_ROWS": "all", **({"NUDGED": "1"} if nudge else {})}
    launched = ["-m", "ddpshim", "run", f"--nproc={num_ranks}", "--log-dir=logs"] if num_ranks else []
    program = [str(ROOT / "evidence" / "transformers_train.py"), name]
    checkpoint = [f"{name}/checkpoint-{LEFT_AT}"] if resumes else []
    ran([*launched, *program, *checkpoint], folder, 240, variables)
    return folder / name


def compare(run: Path, plain: Path, nudged: Path) -> list[str]:
    weights = "best/model.safetensors"
    moved, off, rounding = (
        largest_difference(read(one, name), read(other, name))
        for one, other, name in (
            (plain / f"checkpoint-{LEFT_AT}", plain / f"checkpoint-{STEPS}", "model.safetensors"),
            (run, plain, weights),
            (nudged, plain, weights),
        )
    )
    logs = [[json.dumps(line) for line in json.loads((at / "log.json").read_text())] for at in (run, plain)]
    files = [{str(path.relative_to(at)) for path in at.rglob("*")} for at in (run, plain)]
    return [
        *(f"{moved:.0e}", shown(off, TIMES_ROUNDING * max(rounding, 1e-8)), f"{rounding:.0e}"),
        *(logs_differ(*logs), names_differ(*files)),
    ]


def rows(folder: Path, ranks: list[int]) -> Iterator[list[str]]:
    """Train in all ways, and yield the rows of the table."""
    plain, nudged = start(folder, "plain"), start(folder, "nudged", nudge=True)
    for n in ranks:
        yield [f"{n} ranks", *compare(start(folder, f"on{n}", n), plain, nudged)]
    later = shutil.ignore_patterns(*(f"checkpoint-{n}" for n in range(LEFT_AT + 1, STEPS + 1)), "log.json", "best")
    for name in ("plain", f"on{ranks[0]}"):
        shutil.copytree(folder / name, folder / f"{name}-resumed", ignore=later)
    resumed = start(folder, f"on{ranks[0]}-resumed", ranks[-1], resumes=True)
    alone = start(folder, "plain-resumed", resumes=True)
    what = f"{ranks[0]} ranks to step {LEFT_AT}, resumed on {ranks[-1]}; one process resumed"
    yield [what, *compare(resumed, alone, nudged)]


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    import torch
    from transformers import __version__

    with tempfile.TemporaryDirectory() as temporary:
        lines = pages.table(COLUMNS, rows(Path(temporary), [int(n) for n in args.ranks.split(",")]))
    made = f"transformers {__version__}, torch {torch.__version__}, gloo on CPU, {STEPS} steps of 16 samples."
    pages.finish([*lines, "", made], args.write, START, END)


if __name__ == "__main__":
    main()
