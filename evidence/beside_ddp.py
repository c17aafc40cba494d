"""Measures a step of `setup()` beside one of torch's DistributedDataParallel, in blocks of steps that take turns.

    python -m evidence.beside_ddp [--quick]

Both train in one pair of processes, so that a busy machine slows both alike: two trainers of main_thread_train.py for
each network, tiny and (bc and bc_rnn_gmm) as wide as people train them. While DDP's trainer steps, ddpshim's guards
are taken away. The number is the CPU time of rank 0's main thread, ours over DDP's, by pair of blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import optimizer as of_torch

from evidence import main_thread_train
from evidence.results import Result, main, measured, ratio

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
NAMES = {
    "0": ("bc", "bc_rnn_gmm", "bc_transformer", "unet", "resnet"),
    "1": ("bc", "bc_rnn_gmm"),
}  # by MAIN_THREAD_WIDE
DEADLINE_S = 600


@contextlib.contextmanager
def _without_guards(backward: Any) -> Iterator[None]:
    """Within this block torch is as before `setup()`: no guard looks at backward passes or steps."""
    hooks = [getattr(of_torch, f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]
    watched, kept = torch.autograd.backward, [dict(each) for each in hooks]
    torch.autograd.backward = backward
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        torch.autograd.backward = watched
        for each, before in zip(hooks, kept):
            each.update(before)


def _train(names: list[str], num_blocks: int, num_steps: int, out: Path) -> None:
    """Run as one rank: write for each network and door the milliseconds of a step, by block."""
    torch.set_num_threads(1)
    main_thread_train.Trainer.syncs_batchnorm = False
    backward = torch.autograd.backward
    import ddpshim

    ddpshim.setup(seed=0)
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        torch.manual_seed(0)
        arms = {}
        for door, around in (("shares", contextlib.nullcontext), ("ddp", lambda: _without_guards(backward))):
            with around():
                arms[door] = (main_thread_train.Trainer(door, name, *main_thread_train._make(name)), around)
        of_doors = found[name] = {door: [] for door in arms}
        for block in range(num_blocks + 1):
            for door in sorted(arms, reverse=block % 2 == 1):
                trainer, around = arms[door]
                trainer.spent.clear()
                with around():
                    for _ in range(num_steps):
                        trainer.step()
                of_doors[door] += [1000 * sum(trainer.spent.values()) / num_steps] * (block > 0)  # the first warms up
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # DDP's networks are this rank's own at the end, which cleanup() would refuse


def run(quick: bool) -> Iterator[Result]:
    num_blocks = 8 if quick else 24
    for is_wide, names in NAMES.items():
        words = (__file__, ",".join(names), str(num_blocks), "8" if is_wide == "1" else "25")
        found = measured([*TORCHRUN, *words], {"MAIN_THREAD_WIDE": is_wide}, DEADLINE_S)
        for name, ms in found.items():
            middle, quartiles = ratio(ms["shares"], ms["ddp"])
            kind = "as people train it" if is_wide == "1" else "tiny"
            yield Result("beside_ddp", f"{name}, {kind}", middle, "x torch's DDP", quartiles, 1.05)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _train(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(run, __doc__)
