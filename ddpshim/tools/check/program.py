"""Runs the user's program as the one process of a proof, finds what a report names in it, and ends it with its peers.

Draws nothing and changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Optional


def samples_of(batch: Any) -> tuple[int, Optional[list[str]]]:
    """Return the number of samples in a batch and a hash of each; (0, None) if the batch holds no tensors.

    A sample is one row of every tensor whose first dimension equals that of the batch's first tensor.
    """
    import torch

    strided = (t.detach() for t in _tensors(batch) if t.dim() and t.layout == torch.strided)
    tensors = [t for t in strided if not (t.is_nested or t.is_quantized or t.is_meta)]
    if not tensors or not len(tensors[0]):
        return 0, None
    made = [hashlib.blake2b(digest_size=6) for _ in range(len(tensors[0]))]
    for t in tensors:
        if len(t) == len(made) and t.numel():
            rows = t.resolve_conj().resolve_neg().cpu().reshape(len(t), -1).contiguous().view(torch.uint8).numpy()
            for sample, row in zip(made, rows):
                sample.update(row)
    return len(made), [sample.hexdigest() for sample in made]


def _tensors(batch: Any) -> Iterator[Any]:
    import torch

    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def end_with_peers(folder: Path, num: int, timeout_s: float) -> NoReturn:
    """End this process and its data workers once `folder` holds `num` files "over_*", one per finished process."""
    end = time.monotonic() + timeout_s
    # A peer may still be receiving the last gradients from this one.
    while len(list(folder.glob("over_*"))) < num and time.monotonic() < end:
        time.sleep(0.02)
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a data worker is killed
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Parameters:
    """The names of an optimizer's parameters."""

    def __init__(self, params: Sequence[Any]) -> None:
        from torch.nn.parallel import DistributedDataParallel

        from ddpshim.process.live_modules import live_modules

        mine = {id(p) for p in params}
        names: dict[int, str] = {}  # the longest one: that in the outermost module
        self.groups: list[Any] = []  # keeps the process groups alive until the program has ended
        for module in live_modules():
            if isinstance(module, DistributedDataParallel):
                self.groups.append(module.process_group)
                continue
            for name, p in module.named_parameters():
                if id(p) in mine and len(name) >= len(names.get(id(p), "")):
                    names[id(p)] = name
        self.names = [names.get(id(p), "") for p in params]


def main() -> None:
    """Run `script.py ARGS` or `-m package.module ARGS` as `python` would, and record it, as FOLDER and RUN say."""
    from ddpshim.tools.check.watching import watched

    folder, run, *argv = sys.argv[1:]
    is_module = argv[0] == "-m"
    program, *arguments = argv[is_module:]
    sys.argv = [program, *arguments]
    with watched(folder, run):
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
            runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
