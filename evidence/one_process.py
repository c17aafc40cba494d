"""Compares programs for one process with themselves under `ddpshim run` on two ranks, in alternation.

    python -m evidence.one_process [--quick] [--only act,unet_256] [--scaling]

One thread a rank. The programs are in one_process_programs.py. What a step needs: operations on rows, wholes that were
gathered and their bytes, and messages of every kind (also the gradients' and those of numbers that are read).

`--scaling`: what more ranks can gain when the batch stays that of one process. A step of one sample of the U-Net is the
floor, which does not shrink with the batch; so the most that N ranks can give, without messages, is a step of floor +
(step - floor) / N.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from evidence import pages, results
from evidence.one_process_programs import PROGRAMS
from evidence.results import Result, median_and_quartiles

PROGRAM = Path(__file__).with_name("one_process_programs.py")
NAMES = [name for name in PROGRAMS if name not in ("unet_1", "unet_16")]
SCALING, NUM_ROUNDS, DEADLINE_S = (16, 64, 256), 3, 240


def measure(name: str, num_blocks: int, num_ranks: int) -> dict[str, Any]:
    """Run a program on ranks, or in one process without ddpshim if `num_ranks` is 0."""
    launched = ["-m", "ddpshim", "run", "--nproc", str(num_ranks)] if num_ranks else []
    variables = {"DDPSHIM_BACKEND": "gloo"}  # ranks may then share a GPU
    return results.measured([*launched, str(PROGRAM), name, str(num_blocks)], variables, DEADLINE_S)


def run(quick: bool, names: Iterable[str] = NAMES) -> Iterator[Result]:
    num_blocks, num_rounds = (2, 1) if quick else (4, NUM_ROUNDS)
    for name in names:
        rounds: dict[int, list[dict[str, Any]]] = {0: [], 2: []}
        for number in range(num_rounds):
            for num_ranks in sorted(rounds, reverse=number % 2 == 1):
                rounds[num_ranks].append(measure(name, num_blocks, num_ranks))
        one, two = ([min(found["ms"]) for found in measured] for measured in rounds.values())
        faster, spread = median_and_quartiles([a / b for a, b in zip(one, two)])
        need, computed = rounds[2][-1], [min(min(found["cpu_ms"]) for found in each) for each in rounds.values()]
        note = f"one process {min(one):.1f} ms, of which its main thread computes {computed[0]:.1f}, a rank's "
        note += f"{computed[1]:.1f}; {need['operations']:.0f} operations on rows, {need['gathers']:.0f} gathers of "
        note += f"{need['bytes'] / 1000:.1f} kB, {need['messages']:.0f} messages"
        yield Result("one_process", f"{name}: two ranks", faster, "times one process", spread, note=note)


def scaling() -> None:
    """Print the table of docs/run.md."""

    def ms(batch: int, num_ranks: int) -> float:
        return float(min(measure(f"unet_{batch}", 2, num_ranks)["ms"]))

    floor = statistics.median(ms(1, 0) for _ in range(NUM_ROUNDS))
    print(f"floor (a step of one sample): {floor:.1f} ms\n")

    def rows() -> Iterator[tuple[str, ...]]:
        for batch in SCALING:
            rounds = [(ms(batch, 0), ms(batch, 2)) for _ in range(NUM_ROUNDS)]
            one, two = (statistics.median(times) for times in zip(*rounds))
            most = [f"{one / (floor + (one - floor) / num):.1f}" for num in (2, 8)]
            yield str(batch), f"{one:.0f} ms", f"{two:.0f} ms", f"{one / two:.2f}", *most, f"{one / floor:.0f}"

    pages.table(("batch", "one process", "two ranks", "times as fast", "at most: 2", "8 ranks", "any number"), rows())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", help=f"some of {', '.join(PROGRAMS)}")
    parser.add_argument("--scaling", action="store_true")
    given = parser.parse_args()
    if given.scaling:
        scaling()
    else:
        for result in run(given.quick, given.only.split(",") if given.only else NAMES):
            print(result, flush=True)
