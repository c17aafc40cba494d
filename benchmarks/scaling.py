"""Measures how training scales over ranks with emulated compute, and models it for clusters.

    python -m benchmarks.scaling [--quick] [--write docs/scaling.md]

Measured: a policy whose passes sleep instead of computing, so that eight ranks run on two cores, trained through
`wrap_parallel` and gloo. The global batch is fixed, so compute is divided by the ranks. The model of
ddpshim/observe/ring_model.py, with latency and bandwidth measured between the same processes, is compared with these
times; then it predicts clusters that were not available.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist

import ddpshim
from benchmarks.emulated import SleepingPolicy
from benchmarks.results import Result, alternate, ratio
from ddpshim.observe.ring_model import CLUSTERS, Cluster, Link, Training
from tests.ranks import run_ranks

NUM_PARAMETERS, NUM_LAYERS = 1_000_000, 8
COMPUTE_S = 0.8  # of the global batch, in one process
WORLD_SIZES = (1, 2, 4, 8)
MESSAGES_BYTES = (4 * 2**10, 4 * 2**20)


@dataclass(frozen=True)
class Measured:
    """The main rank's times with one number of ranks, in seconds, as medians over rounds."""

    world_size: int
    step_s: float
    alone_s: float  # the same step under no_sync: the time of the sleeps
    speed: float  # alone / step
    quartiles: tuple[float, float]
    link: Optional[Link]  # None for one rank


def _measure(num_rounds: int) -> dict[str, Any]:
    """Return the times of this rank's steps and messages (collective)."""
    here = ddpshim.world()
    bare = SleepingPolicy(NUM_PARAMETERS, NUM_LAYERS, COMPUTE_S / here.world_size)
    policy = ddpshim.wrap_parallel(bare)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)

    def step(synchronised: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        with policy.accumulate(is_last=synchronised):
            policy(torch.ones(1)).backward()
        if synchronised:
            optimizer.step()
        spent = time.perf_counter() - start
        # By hand: the guard refuses an optimizer step on one rank's gradients.
        optimizer.zero_grad(set_to_none=False)
        return spent

    for is_last in (True, False, True):
        step(is_last)
    found: dict[str, Any] = dict(alternate({"alone": lambda: step(False), "step": lambda: step(True)}, num_rounds))
    step(True)  # completes the accumulation that no_sync began
    for num_bytes in MESSAGES_BYTES:
        message = torch.zeros(num_bytes // 4)
        times = []
        for _ in range(4 * num_rounds):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(message)
            times.append(time.perf_counter() - start)
        found[str(num_bytes)] = statistics.median(times)
    return found


def _link(found: dict[str, Any], world_size: int) -> Optional[Link]:
    """Return the latency and bandwidth of a ring on which the two messages would take their measured times."""
    if world_size == 1:
        return None
    small, large = (found[str(num_bytes)] for num_bytes in MESSAGES_BYTES)
    hops = 2 * (world_size - 1)
    slope = (large - small) / (MESSAGES_BYTES[1] - MESSAGES_BYTES[0])
    latency_s = max(0.0, small - slope * MESSAGES_BYTES[0]) / hops
    return Link(hops / world_size / slope, latency_s)


def measure(quick: bool) -> list[Measured]:
    """Measure steps with 1, 2, 4 and 8 ranks on this machine; `quick`: with 1, 2 and 4."""
    rows = []
    for world_size in WORLD_SIZES[: 3 if quick else None]:
        found = run_ranks(_measure, world_size, 5 if quick else 30, timeout_s=300)[0]
        speed, quartiles = ratio(found["alone"], found["step"])
        step_s, alone_s = statistics.median(found["step"]), statistics.median(found["alone"])
        rows.append(Measured(world_size, step_s, alone_s, speed, quartiles, _link(found, world_size)))
    return rows


def modelled_s(row: Measured) -> float:
    """Return the model's time for a step that was measured."""
    if row.link is None:
        return row.alone_s
    here = Cluster("here", row.link, row.link, gpus_per_node=row.world_size)
    bucket_bytes = 4 * NUM_PARAMETERS / NUM_LAYERS  # each layer's gradient is larger than ddpshim's bucket
    return Training(NUM_PARAMETERS, row.alone_s, bucket_bytes).step_s(row.world_size, here)


def _results(rows: list[Measured]) -> list[Result]:
    """Return one result for each number of ranks."""
    results = []
    for row in rows:
        speedup = rows[0].step_s / row.step_s
        note = f"step {row.step_s * 1e3:.0f} ms, modelled {modelled_s(row) * 1e3:.0f} ms; {speedup:.2f} times one rank"
        what = f"compute / step, {row.world_size} ranks, emulated compute"
        results.append(Result("scaling", what, row.speed, "", row.quartiles, note=note))
    return results


def run(quick: bool) -> list[Result]:
    """Measure scaling on this machine; docs/scaling.md has the clusters."""
    return _results(measure(quick))


# Assumptions about GPU and policy. A sample costs 6 FLOPs per parameter and position of a 1-D U-Net, which has
# POSITIONS positions on average over its levels (horizon 16), and 3 x 3.6 GFLOPs per 224 x 224 image in a ResNet-18.
FLOPS, POSITIONS, FLOPS_OF_AN_IMAGE = 20e12, 8, 3 * 3.6e9
KINDS = {"low-dim": 0, "two cameras, two frames": 4}  # images in a sample
SIZES = (20e6, 65e6, 100e6, 300e6)
GPUS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCH_PER_RANK, GLOBAL_BATCH = 64, 1024


def compute_s(num_parameters: float, batch_size_per_rank: float, num_images: int) -> float:
    """Return the seconds of one rank's forward and backward pass, under the assumptions above."""
    return (6 * num_parameters * POSITIONS + num_images * FLOPS_OF_AN_IMAGE) * batch_size_per_rank / FLOPS


def page(rows: list[Measured]) -> str:
    """Return the Markdown of docs/scaling.md below its title."""
    lines = [
        "This page shows how the time of a step falls with the number of ranks: measured with emulated compute on a "
        "CPU, and modelled for clusters of GPUs.",
        "",
        "## Measured",
        "",
        f"A policy of {NUM_PARAMETERS:,} parameters whose passes sleep {COMPUTE_S * 1e3:.0f} ms for the global batch, "
        f"on {torch.get_num_threads()} cores with gloo. *Compute / step* compares each step with the same step under "
        "`no_sync()`; the two alternate. The model uses the latency and bandwidth of all-reduces between the same "
        "processes.",
        "",
        "| ranks | step | modelled | speed-up over one rank | compute / step (quartiles) |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        spread = f"{row.speed:.3f} ({row.quartiles[0]:.3f} to {row.quartiles[1]:.3f})"
        lines.append(
            f"| {row.world_size} | {row.step_s * 1e3:.0f} ms | {modelled_s(row) * 1e3:.0f} ms | "
            f"{rows[0].step_s / row.step_s:.2f} | {spread} |"
        )
    lines += ["", "![scaling](scaling.png)", "", "## Modelled", ""]
    lines += [
        f"Nothing below was measured. Assumptions: a GPU reaches {FLOPS / 1e12:.0f} TFLOP/s; a sample of a diffusion "
        f"policy costs 6 FLOPs x parameters x {POSITIONS} positions, and {FLOPS_OF_AN_IMAGE / 1e9:.1f} GFLOPs per "
        "image; links reach 80% of the vendors' figures (ddpshim/observe/ring_model.py); 8 GPUs per node. Numbers are "
        "compute / step: 1.00 is perfect.",
        "",
        f"### {BATCH_PER_RANK} samples per GPU, buckets of 25 MB",
        "",
    ]
    for cluster in CLUSTERS:
        for kind, num_images in KINDS.items():
            lines += [f"{cluster.name}, {kind}:", "", _head("policy"), _rule()]
            for size in SIZES:
                training = Training(size, compute_s(size, BATCH_PER_RANK, num_images))
                values = [training.efficiency(world, cluster) for world in GPUS]
                lines.append(_line(f"{size / 1e6:.0f}M parameters", values))
            lines.append("")
    lines += [f"### What helps: 100M parameters, low-dim, {BATCH_PER_RANK} samples per GPU", ""]
    base = {"num_parameters": 100e6, "compute_s": compute_s(100e6, BATCH_PER_RANK, 0)}
    ways = {
        "no overlap": Training(**base, overlaps=False),
        "one bucket": Training(**base, bucket_bytes=float("inf")),
        "buckets of 25 MB": Training(**base),
        "buckets of 1 MB": Training(**base, bucket_bytes=2**20),
        "25 MB, bf16 compression": Training(**base, bytes_per_parameter=2.0),
        "25 MB, 4 passes per step": Training(**base, accumulation_steps=4),
    }
    for cluster in CLUSTERS:
        lines += [f"{cluster.name}:", "", _head("setting"), _rule()]
        for name, way in ways.items():
            lines.append(_line(name, [way.efficiency(world, cluster) for world in GPUS]))
        lines.append("")
    lines += [
        f"### Speed-up at a fixed global batch of {GLOBAL_BATCH}: 100M parameters, four images",
        "",
        _head("cluster"),
        _rule(),
    ]
    for cluster in CLUSTERS:
        lines.append(_line(cluster.name, [_speedup(world, cluster) for world in GPUS], digits=1))
    lines += [
        "",
        "bf16 compression rounds gradients and is not exact; accumulation over 4 passes needs a batch 4 times as "
        "large, or 4 smaller passes.",
    ]
    return "\n".join(lines) + "\n"


def _speedup(world_size: int, cluster: Cluster) -> float:
    alone = compute_s(100e6, GLOBAL_BATCH, 4)
    return alone / Training(100e6, alone / world_size).step_s(world_size, cluster)


def _head(first: str) -> str:
    return f"| {first} | " + " | ".join(f"{world} GPUs" for world in GPUS) + " |"


def _rule() -> str:
    return "| --- |" + " ---: |" * len(GPUS)


def _line(name: str, values: Sequence[float], digits: int = 2) -> str:
    return f"| {name} | " + " | ".join(f"{value:.{digits}f}" for value in values) + " |"


def draw(rows: list[Measured], file: Path) -> None:
    """Draw measured beside modelled steps, and the model's predictions for clusters."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    ranks = [row.world_size for row in rows]
    left.plot(ranks, [rows[0].step_s / row.step_s for row in rows], "o-", label="measured")
    left.plot(ranks, [modelled_s(rows[0]) / modelled_s(row) for row in rows], "x--", label="modelled")
    left.plot(ranks, ranks, color="0.7", label="perfect")
    left.set(xlabel="ranks", ylabel="times faster than one rank", title="measured: emulated compute, gloo, CPU")
    for cluster in CLUSTERS:
        right.plot(GPUS, [_speedup(world, cluster) for world in GPUS], ".-", label=cluster.name)
    right.plot(GPUS, GPUS, color="0.7", label="perfect")
    right.set(xlabel="GPUs", title=f"modelled: 100M parameters, images, global batch {GLOBAL_BATCH}")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", type=Path, help="the page to write; its picture goes beside it")
    args = parser.parse_args(argv)
    rows = measure(args.quick)
    text = page(rows)
    if args.write is None:
        print(text, end="")
        return 0
    command = f"`python -m benchmarks.scaling --write docs/{args.write.name}`"
    args.write.write_text(f"# Scaling\n\nWritten by {command}.\n\n{text}", encoding="utf-8")
    draw(rows, args.write.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
