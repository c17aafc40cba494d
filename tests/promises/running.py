"""Runs tests/promises/trainer.py in one process or on ranks, and reads what it wrote."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ddpshim import variables
from tests.preloaded import environment, preloaded, start_afresh
from tests.preloaded_commands import SOCKET

TRAINER, BY_CALLS = (Path(__file__).with_name(name) for name in ("trainer.py", "by_calls.py"))
DEADLINE_S = 120


def command(folder: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    """Run `python arguments…` in `folder`, dividing tiny networks too; return its exit code and its output."""
    folder.mkdir(exist_ok=True)
    return start_afresh(arguments, {**environment(), variables.ROWS: "all", **environ}, folder, DEADLINE_S)


def launched(ranks: int) -> tuple[str, ...]:
    return ("-m", "ddpshim", "run", "--nproc", str(ranks)) if ranks else ()


def trained(folder: Path, *options: str, door: str = "", ranks: int = 0, code: int = 0, **environ: str) -> str:
    """Run the trainer into `folder`/out, plainly or on `ranks`; return what it printed."""
    program = [str(BY_CALLS), door] if door else [str(TRAINER)]
    found, said = command(folder, *launched(ranks), *program, "out", *options, **environ)
    assert found == code, said[-6000:]
    return said


def result(*options: str, door: str = "", ranks: int = 0) -> Path:
    """Return a folder in which the trainer has been run so: once for the tests of all files and processes."""
    folder = Path(os.environ.get(SOCKET, preloaded().socket)).with_name(
        "_".join(["promise", door, str(ranks), *options])
    )
    with open(f"{folder}.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():
            shutil.rmtree(folder, ignore_errors=True)
            trained(folder, *options, door=door, ranks=ranks)
            lock.write("trained")
    return folder


def steps_of(folder: Path, rank: str = "") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / f"steps{rank}.jsonl").read_text().splitlines()]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    saved = torch.load(folder / "out" / "last.pth")
    return {f"{part}.{name}": value for part, state in saved.items() for name, value in state.items()}
