"""Trains examples/image_bc.py in one process and on two and three ranks, by ddpshim and others: the README's table.

    python -m evidence.image_bc

Two CPU cores suffice; it takes five minutes. evidence/ports has the changes for accelerate and Fabric, made as their
pages describe; without these packages their rows are left out.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from evidence import pages
from evidence.results import ROOT, ran

TRAINER, CHANGES = ROOT / "examples" / "image_bc.py", ROOT / "evidence" / "ports"
_RUN = ("-m", "ddpshim", "run", "--nproc")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
DEADLINE_S = 900
WAYS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {  # launcher, patch, arguments
    "one process": ((), "", ()),
    "`ddpshim run`, 2 ranks": ((*_RUN, "2"), "", ()),
    "`ddpshim run`, 3 ranks": ((*_RUN, "3"), "", ()),
    "accelerate, 2 ranks": (_TORCHRUN, "accelerate", ()),
    "accelerate with `split_batches`, 2 ranks": (_TORCHRUN, "accelerate", ("split",)),
    "Fabric, 2 ranks": (_TORCHRUN, "fabric", ()),
}
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}


def changed(patch: str, folder: Path) -> Path:
    """Return a copy of the trainer in `folder` with a patch applied."""
    copy = folder / "examples" / TRAINER.name
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(TRAINER.read_bytes())
    subprocess.run(["git", "apply", str(CHANGES / f"{patch}.patch")], cwd=folder, check=True)
    return copy


def num_changed(patch: str) -> int:
    """Return how many lines of the trainer a patch adds or removes."""
    lines = (CHANGES / f"{patch}.patch").read_text().splitlines() if patch else []
    return sum(line.startswith(("+", "-")) and not line.startswith(("+++", "---")) for line in lines)


def best(launcher: tuple[str, ...], patch: str, arguments: tuple[str, ...]) -> str:
    """Train, and return the best validation error."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = changed(patch, Path(folder)) if patch else TRAINER
        command = [*launcher, str(trainer), "out", *arguments]
        said = ran(command, Path(folder), DEADLINE_S, {"ACCELERATE_USE_CPU": "true"})
        return str(re.findall(r"best validation: ([\d.]+)", said)[0])


def rows() -> Iterator[tuple[str, ...]]:
    for way, (launcher, patch, arguments) in WAYS.items():
        if not patch or importlib.util.find_spec(PACKAGES[patch]):
            yield way, str(num_changed(patch)), best(launcher, patch, arguments)


if __name__ == "__main__":
    pages.table(("", "lines changed", "best validation error"), rows())
