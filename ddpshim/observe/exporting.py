"""Writes a run's curves, means over ranks by epoch, as TensorBoard events or an offline W&B run."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any, Optional

from ddpshim.errors import ReportError
from ddpshim.observe.runs import Run

KINDS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}  # with the packages that write them


def export(run: Run, out: Optional[Path], kind: str) -> Path:
    """Write a run's curves as `kind`, below `out` or the run's folder; return their folder. Local.

    Raises ReportError if the package that writes them is not installed.
    """
    if not any(map(importlib.util.find_spec, KINDS[kind])):
        names = " or ".join(KINDS[kind])
        raise ReportError(f"{names} is not installed; no curve would be written. Run `pip install {KINDS[kind][0]}`.")
    folder = out or run.folder
    folder.mkdir(parents=True, exist_ok=True)
    curves = run.curves()
    if kind == "tensorboard":
        with contextlib.closing(_summary_writer()(str(folder / kind))) as writer:
            for name, curve in curves.items():
                for epoch, value in curve.items():
                    writer.add_scalar(name, value, int(epoch))
    else:
        mode = os.environ.get("WANDB_MODE", "offline")
        logged = importlib.import_module("wandb").init(dir=str(folder), name=folder.absolute().name, mode=mode)
        for epoch in sorted({epoch for curve in curves.values() for epoch in curve}):
            logged.log({"epoch": epoch, **{name: curve[epoch] for name, curve in curves.items() if epoch in curve}})
        logged.finish()
    return folder / kind


def _summary_writer() -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    return importlib.import_module("tensorboardX").SummaryWriter
