"""Compares programs for one process with themselves under `ddpshim run`, and under hand-written DDP, in alternation.

    python -m evidence.one_process [--quick] [--only act,unet_256] [--scaling]

Two ranks, one thread each. The programs are in one_process_programs.py. Hand-written DDP has half of the batch on each
rank, noise of its own, and a BatchNorm that is synced by hand; its numbers are others. What a step needs: operations on
rows, wholes that were gathered and their bytes, and messages of every kind (also the gradients' and those of numbers
read).

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
from evidence.results import Result

PROGRAM = Path(__file__).with_name("one_process_programs.py")
NAMES = [name for name in PROGRAMS if name not in ("unet_1", "unet_16")]
SCALING, NUM_ROUNDS, DEADLINE_S = (16, 64, 256), 3, 240


def measure(name: str, num_blocks: int, num_ranks: int, by_hand: bool = False) -> dict[str, Any]:
    """Run a program on ranks by `run`, or by torchrun with DDP; in one process without either if `num_ranks` is 0."""
    launched = ["-m", "ddpshim", "run", "--nproc", str(num_ranks)] if num_ranks else []
    # Ranks may then share a GPU. A training calls a network often enough that its calls are replayed: here at once.
    variables = {"DDPSHIM_BACKEND": "gloo", "DDPSHIM_CAPTURE": "force"}
    if by_hand:
        launched = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
        variables["DDP_BY_HAND"] = "1"
    return results.measured([*launched, str(PROGRAM), name, str(num_blocks)], variables, DEADLINE_S)


def run(quick: bool, names: Iterable[str] = NAMES) -> Iterator[Result]:
    num_blocks, num_rounds = (2, 1) if quick else (4, NUM_ROUNDS)
    for name in names:
        found = results.alternate(
            {
                "one process": lambda name=name: measure(name, num_blocks, 0),  # type: ignore[misc]
                "by hand": lambda name=name: measure(name, num_blocks, 2, by_hand=True),  # type: ignore[misc]
                "run": lambda name=name: measure(name, num_blocks, 2),  # type: ignore[misc]
            },
            num_rounds,
        )

        def least(arm: str, clock: str, rounds: Any = found) -> list[float]:
            return [min(one[clock]) for one in rounds[arm]]

        need = found["run"][-1]
        note = "; ".join(
            f"{arm} {min(least(arm, 'ms')):.1f} ms, CPU {min(least(arm, 'cpu_ms')):.1f}, of which its main thread "
            f"{min(least(arm, 'main_ms')):.1f}"
            for arm in found
        )
        note += f"; {need['operations']:.0f} operations on rows, {need['gathers']:.0f} gathers of "
        note += f"{need['bytes'] / 1000:.1f} kB, {need['messages']:.0f} messages"
        faster, spread = results.ratio(least("one process", "ms"), least("run", "ms"))
        yield Result("one_process", f"{name}: two ranks", faster, "times one process", spread, note=note)
        for clock, what in (("ms", "time of a step"), ("cpu_ms", "CPU time of a rank")):
            times, spread = results.ratio(least("run", clock), least("by hand", clock))
            yield Result("one_process", f"{name}: {what}", times, "x DDP by hand", spread)


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
