"""Measures what each part of a training step takes of the main thread, which bounds a policy's step on a GPU.

    python -m evidence.main_thread [--quick]

Two ranks, one thread each, batch 8, tiny widths (main_thread_train.py): arithmetic takes nearly nothing, so what is
left is overhead: CPU time of rank 0's main thread. Doors in alternation: one process, torch's DDP with
DistributedSampler, accelerate (if installed), `setup()` with `make_loader` and `wrap_parallel` (shares), and `run` of
the unchanged program, with its networks captured and by the rules of row tensors alone. On a machine with one GPU the
ranks share it, through the nccl that is there (2.30 and later can): what the main thread takes is then as on two GPUs,
a step's time is not. MAIN_THREAD_WIDE=1 gives a CPU the widths of a GPU, and batches of 32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from evidence.main_thread_train import IS_GPU, NETWORKS, PARTS
from evidence.results import Result, alternate, main, measured, median_and_quartiles, ratio

PROGRAM = Path(__file__).with_name("main_thread_train.py")
_SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1", "DDPSHIM_BACKEND": "nccl"}
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
_RUN = ("-m", "ddpshim", "run", "--nproc", "2")
DOORS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {  # the program's door, its launcher, variables
    "one process": ("plain", (), {}),
    "torch's DDP": ("ddp", _TORCHRUN, {}),
    "accelerate": ("accelerate", _TORCHRUN, {}),
    "shares": ("shares", _TORCHRUN, {}),
    "run by rules": ("plain", _RUN, {"DDPSHIM_ROWS": "all", "DDPSHIM_CAPTURE": "off"}),
    "run": ("plain", _RUN, {"DDPSHIM_ROWS": "all", "DDPSHIM_CAPTURE": "force"}),
}
MOST = {"bc": 1.5, "act": 1.25, "resnet": 1.1}  # of `run` over torch's DDP
MOST |= dict.fromkeys(("bc_rnn_gmm", "bc_transformer", "unet"), 1.2)
DEADLINE_S = 400


def measure(door: str, names: Iterable[str], num_steps: int) -> dict[str, Any]:
    """Run the program once; return what it found for each network."""
    kind, launcher, variables = DOORS[door]
    if IS_GPU and launcher:
        variables = {**variables, **_SHARED}
    return measured([*launcher, str(PROGRAM), kind, ",".join(names), str(num_steps)], variables, DEADLINE_S)


def run(quick: bool, names: Iterable[str] = NETWORKS) -> Iterator[Result]:
    num_rounds, num_steps = (1, 60) if quick else (3, 150)
    has_accelerate = importlib.util.find_spec("accelerate") and not IS_GPU  # it would give each rank its own GPU
    doors = [door for door in DOORS if door != "accelerate" or has_accelerate]
    found: dict[str, list[Any]] = alternate(
        {door: lambda door=door: measure(door, names, num_steps) for door in doors}, num_rounds
    )
    for name in names:
        sums = {door: [sum(one[name]["ms"].values()) for one in rounds] for door, rounds in found.items()}
        for door, rounds in found.items():
            parts = {part: median_and_quartiles([one[name]["ms"][part] for one in rounds])[0] for part in PARTS}
            waits = rounds[0][name]["waits"]
            note = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items())
            note += f"; a step's time {median_and_quartiles([one[name]['wall_ms'] for one in rounds])[0]:.2f}"
            note += f"; blocking: {', '.join(f'{place} {num}' for place, num in waits.items()) or 'none'}"
            middle, quartiles = median_and_quartiles(sums[door])
            yield Result("main_thread", f"{name}, {door}", middle, "ms", quartiles, note=note)
        for door, base, most in (("run", "torch's DDP", MOST[name]), ("shares", "torch's DDP", 1.05)):
            middle, quartiles = ratio(sums[door], sums[base])
            yield Result("main_thread", f"{name}, {door}", middle, f"x {base}", quartiles, most)


if __name__ == "__main__":
    main(run, __doc__)
