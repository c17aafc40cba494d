"""Runs short programs for one process, each from the same seeds, and writes what they logged and trained.

`python -m tests.one_process.hostile OUT [--only A,B] [--nudge] [--device cuda]` writes OUT/results.json
after every program: {name: {"log": [...], "weights": [...], "error": null or text}}.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
from pathlib import Path
from typing import Any, Callable, Optional, Union

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


def read(value: Any) -> Any:
    """Return `value` as json can hold it."""
    if isinstance(value, Tensor):
        return (torch.view_as_real(value) if value.is_complex() else value).tolist()
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


Trained = list[Union[nn.Module, Tensor]]


class Log:
    """Collects numbers in the order in which a program reads them."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def __call__(self, *values: Any) -> None:
        self.lines += map(read, values)


Program = Callable[[Log], Trained]


class Programs(dict[str, Program]):
    def __setitem__(self, name: str, program: Program) -> None:
        assert name not in self, f"two programs are called {name}"
        super().__setitem__(name, program)

    def add(self, program: Program) -> Program:
        self[program.__name__] = program
        return program


def compute_on(device: str) -> None:
    """Make `device` the default of tensors, and of the generators of data loaders, which torch expects there then."""
    torch.set_default_device(device)
    make = DataLoader.__init__

    @functools.wraps(make)
    def init(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        draws = kwargs.get("shuffle") or "sampler" in kwargs
        if draws and torch.empty(()).device.type == torch.device(device).type:  # the default is the main thread's
            kwargs.setdefault("generator", torch.Generator(device).manual_seed(int(torch.randint(1 << 30, ()))))
        make(self, dataset, *args, **kwargs)

    DataLoader.__init__ = init  # type: ignore[method-assign]


def nudge() -> None:
    """Change the last bit of what is drawn by torch.randn and by the usual initialisations of weights."""

    def nudged(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            out = draw(*args, **kwargs)
            out.data.mul_(1 + torch.finfo(out.dtype).eps)
            return out

        return call

    torch.randn = nudged(torch.randn)
    for name in ("kaiming_uniform_", "xavier_uniform_", "uniform_", "normal_"):
        setattr(nn.init, name, nudged(getattr(nn.init, name)))


def main(programs: Programs, argv: Optional[list[str]] = None) -> None:
    """Run `programs` and write their results, after each of them, so that a hang shows where."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(programs))
    parser.add_argument("--nudge", action="store_true", help="change the last bit of the initial weights and data")
    parser.add_argument("--device", help="where tensors are made")
    options = parser.parse_args(argv)
    if options.device:
        compute_on(options.device)
    if options.nudge:
        nudge()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in options.only:
        print(name, flush=True)
        gc.collect()  # networks of programs before are gone on all ranks, and in all runs that `check` compares
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        log, weights, error = Log(), [], None
        try:
            for part in programs[name](log):
                weights += [read(x) for x in (part.state_dict().values() if isinstance(part, nn.Module) else [part])]
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        results[name] = {"log": log.lines, "weights": weights, "error": error}
        (options.out / "results.json").write_text(json.dumps(results))
