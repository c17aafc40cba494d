"""Runs the user's program as the one process of a proof, finds what a report names in it, and ends it with its peers.

Draws nothing and changes nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Optional

_MAX_PARTS = 1024  # approximate limit on the entries of a sample that are hashed


def samples_of(batch: Any) -> tuple[int, Optional[list[str]]]:
    """Return the number of samples in a batch and a hash of each; (0, None) if the batch holds no tensors.

    A sample is one row of every tensor whose first dimension equals that of the batch's first tensor.
    """
    import torch

    with torch.no_grad():
        strided = (t for t in _tensors(batch) if t.dim() and t.layout == torch.strided)
        tensors = [t.detach() for t in strided if not (t.is_nested or t.is_quantized or t.is_meta)]
        if not tensors or not len(tensors[0]):
            return 0, None
        size = len(tensors[0])
        names = torch.zeros(size, dtype=torch.int64, device="cpu")  # even if the program sets a default device
        for i, t in enumerate(t for t in tensors if len(t) == size):
            rows = t.flatten(1) if t.dim() > 1 else t[:, None]
            rows = rows[:, :: max(1, rows.shape[1] // _MAX_PARTS)]
            if rows.is_complex():
                rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
            if rows.is_floating_point():
                rows = rows.double().view(torch.int64)
            bits = rows.to("cpu", torch.int64)
            # Scrambled odd weights, one per position: the same entries at other positions get another hash.
            weights = torch.arange(i + 1, i + 1 + bits.shape[1], device="cpu") * 0x5851F42D4C957F2D + (2 * i + 1)
            names += ((bits ^ (bits >> 31)) * (weights | 1)).sum(1)
        return size, [f"{name & 0xFFFFFFFFFFFF:x}" for name in names.tolist()]


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

        modules = live_modules()
        mine = {id(p) for p in params}
        named: list[tuple[str, Any]] = []
        self.groups: list[Any] = []  # keeps the process groups alive until the program has ended
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                self.groups.append(module.process_group)
            else:
                named += [(name, p) for name, p in module.named_parameters() if id(p) in mine]
        names = _outermost(named)
        self.names = [names.get(id(p), "") for p in params]


def _outermost(named: Sequence[tuple[str, Any]]) -> dict[int, str]:
    """Return id -> the tensor's longest name, which is its name in the outermost module."""
    return {id(tensor): name for name, tensor in sorted(named, key=lambda item: len(item[0]))}


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
