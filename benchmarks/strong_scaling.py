"""Measures what more ranks can gain when the batch stays that of one process: `python -m benchmarks.strong_scaling`.

A diffusion U-Net (benchmarks/one_process_programs.py), unedited, in one process and on two ranks, in alternation, one
thread a rank, by batch. A step of one sample is the floor: what does not shrink with the batch. From it and the step in
one process follows the most that N ranks can give, without messages: floor + (step - floor) / N.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.one_process import measure

ROOT = Path(__file__).resolve().parent.parent
BATCHES = (16, 64, 256)
NUM_BLOCKS, NUM_ROUNDS = 2, 3


def milliseconds(batch: int, num_ranks: int) -> float:
    return float(min(measure(f"unet_{batch}", NUM_BLOCKS, ROOT if num_ranks > 1 else None, num_ranks)["ms"]))


def main() -> None:
    floor = statistics.median(milliseconds(1, 1) for _ in range(NUM_ROUNDS))
    print(f"floor (a step of one sample): {floor:.1f} ms\n")
    print("| batch | one process | two ranks | times as fast | at most: 2 ranks | 8 ranks | any number |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for batch in BATCHES:
        rounds = [(milliseconds(batch, 1), milliseconds(batch, 2)) for _ in range(NUM_ROUNDS)]
        one, two = (statistics.median(times) for times in zip(*rounds))
        most = " | ".join(f"{one / (floor + (one - floor) / num):.1f}" for num in (2, 8))
        print(f"| {batch} | {one:.0f} ms | {two:.0f} ms | {one / two:.2f} | {most} | {one / floor:.0f} |", flush=True)


if __name__ == "__main__":
    main()
