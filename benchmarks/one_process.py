"""Compares programs for one process with themselves under `ddpshim run` on two ranks, in alternation.

    python -m benchmarks.one_process [--quick] [--only act,mingpt] [--against FOLDER]

`--against` is a checkout of another commit, whose `run` takes part. One thread a rank. The programs are in
one_process_programs.py. What a step needs: operations on rows, wholes that were gathered and their bytes, and messages
of every kind (also the gradients' and those of numbers that are read).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Optional

from benchmarks.one_process_programs import PROGRAMS
from benchmarks.results import Result, median_and_quartiles

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).with_name("one_process_programs.py")
NAMES = [name for name in PROGRAMS if name not in ("unet_1", "unet_16")]  # those: strong_scaling.py
DIVIDED_TOO = {"replay", "replay_16384", "classifier", "sampling"}  # with a target of their own
LEAST_TIMES, MOST_TIMES = 1.6, 1.02
DEADLINE_S = 240


def measure(name: str, num_blocks: int, tree: Optional[Path], num_ranks: int = 2) -> dict[str, Any]:
    """Run a program on ranks with the ddpshim of `tree`, or in one process without it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launched = [] if tree is None else ["-m", "ddpshim", "run", "--nproc", str(num_ranks)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environ["DDPSHIM_BACKEND"] = "gloo"  # ranks may then share a GPU
        if tree is not None:
            environ["PYTHONPATH"] = str(tree)
        command = [sys.executable, *launched, str(PROGRAM), name, str(num_blocks), str(out)]
        ran = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"{name}: {ran.stdout[-2000:]}{ran.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def results(quick: bool, names: Iterable[str] = NAMES, against: Optional[Path] = None) -> Iterator[Result]:
    arms: dict[str, Optional[Path]] = {"one process": None, "rows": ROOT}
    if against is not None:
        arms["other"] = against
    num_blocks, num_rounds = (2, 1) if quick else (4, 3)
    for name in names:
        rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for number in range(num_rounds):
            for arm in sorted(arms, reverse=number % 2 == 1):
                rounds[arm].append(measure(name, num_blocks, arms[arm]))
        times = {arm: [min(found["ms"]) for found in measured] for arm, measured in rounds.items()}
        faster, spread = median_and_quartiles([a / b for a, b in zip(times["one process"], times["rows"])])
        need = rounds["rows"][-1]
        computed = {arm: min(min(found["cpu_ms"]) for found in measured) for arm, measured in rounds.items()}
        note = f"one process {min(times['one process']):.1f} ms, of which its main thread computes "
        note += f"{computed['one process']:.1f}, a rank's {computed['rows']:.1f}; "
        note += f"{need['operations']:.0f} operations on rows, "
        note += f"{need['gathers']:.0f} gathers of {need['bytes'] / 1000:.1f} kB, {need['messages']:.0f} messages"
        least = LEAST_TIMES if name in DIVIDED_TOO else None
        what = f"{name}: two ranks"
        yield Result("one_process", what, faster, "x as fast as one process", spread, at_least=least, note=note)
        if against is not None:
            slower, spread = median_and_quartiles([a / b for a, b in zip(times["rows"], times["other"])])
            yield Result(
                "one_process", f"{name}: a step's wall time", slower, "x the other tree's", spread, at_most=MOST_TIMES
            )


def run(quick: bool) -> list[Result]:
    return list(results(quick))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", help=f"some of {', '.join(PROGRAMS)}")
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    given = parser.parse_args()
    for result in results(given.quick, given.only.split(",") if given.only else NAMES, given.against):
        print(result, flush=True)
