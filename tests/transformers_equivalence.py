"""Compares transformers.Trainer on N ranks with one process without a launcher, with dropout.

Run it: python -m tests.transformers_equivalence [--ranks 2,3] [--write docs/other_codebases.md]

It needs the environment of requirements/lerobot.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import pages
from tests.lerobot_equivalence import largest_difference, logs_differ

ROOT = Path(__file__).parent.parent
START = "<!-- what follows is written by python -m tests.transformers_equivalence --write docs/other_codebases.md -->\n"
END = "<!-- end of transformers -->\n"
COLUMNS = ["run", "moved by training", "weights", "nudged weights", "log", "files"]
STEPS, LEFT_AT = 9, 4


def start(folder: Path, name: str, num_ranks: int = 0, nudge: bool = False, *, resumes: bool = False) -> Path:
    """Train in `folder`/`name`, on ranks or in one process; return that folder."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DDPSHIM_ROWS": "all", "PYTHONPATH": str(ROOT)}
    if nudge:
        environ["NUDGED"] = "1"
    launched = ["-m", "ddpshim", "run", f"--nproc={num_ranks}", "--log-dir=logs"] if num_ranks else []
    program = [str(ROOT / "tests" / "transformers_train.py"), name]
    checkpoint = [f"{name}/checkpoint-{LEFT_AT}"] if resumes else []
    command = [sys.executable, *launched, *program, *checkpoint]
    ran = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr[-6000:]}")
    return folder / name


def compare(run: Path, plain: Path, nudged: Path) -> list[str]:
    weights = "best/model.safetensors"
    moved, off, rounding = (
        largest_difference(one, other, name)
        for one, other, name in (
            (plain / f"checkpoint-{LEFT_AT}", plain / f"checkpoint-{STEPS}", "model.safetensors"),
            (run, plain, weights),
            (nudged, plain, weights),
        )
    )
    logs = [[json.dumps(line) for line in json.loads((at / "log.json").read_text())] for at in (run, plain)]
    files = [{str(path.relative_to(at)) for path in at.rglob("*")} for at in (run, plain)]
    return [
        *(f"{moved:.0e}", f"{off:.0e}" if off <= 10 * max(rounding, 1e-8) else f"**{off:.0e}**", f"{rounding:.0e}"),
        *(logs_differ(*logs), f"**{sorted(files[0] ^ files[1])}**" if files[0] ^ files[1] else "same"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,3", help="a run on the first is resumed on the last")
    parser.add_argument("--write", type=Path, help="a page that has the line after which the table stands")
    args = parser.parse_args()
    import torch
    import transformers

    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    with tempfile.TemporaryDirectory() as temporary:
        folder, ranks = Path(temporary), [int(n) for n in args.ranks.split(",")]
        plain, nudged = start(folder, "plain"), start(folder, "nudged", nudge=True)
        runs = {f"{n} ranks": (start(folder, f"on{n}", n), plain) for n in ranks}
        for name in ("plain", f"on{ranks[0]}"):
            later = shutil.ignore_patterns(
                *(f"checkpoint-{n}" for n in range(LEFT_AT + 1, STEPS + 1)), "log.json", "best"
            )
            shutil.copytree(folder / name, folder / f"{name}-resumed", ignore=later)
        resumed = start(folder, f"on{ranks[0]}-resumed", ranks[-1], resumes=True)
        what = f"{ranks[0]} ranks to step {LEFT_AT}, resumed on {ranks[-1]}; one process resumed"
        runs[what] = (resumed, start(folder, "plain-resumed", resumes=True))
        for name, (run, alone) in runs.items():
            lines.append(f"| {' | '.join([name, *compare(run, alone, nudged)])} |")
    made = (
        f"transformers {transformers.__version__}, torch {torch.__version__}, gloo on CPU, {STEPS} steps of 16 samples."
    )
    text = "\n".join([*lines, "", made]) + "\n"
    print(text)
    if args.write:
        pages.fill(args.write, START, text, END)
    sys.exit("**" in text)


if __name__ == "__main__":
    main()
