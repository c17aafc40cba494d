"""Runs the robomimic trainer of a tree from `evidence.equivalence.copy_release`, in the way that its name states."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

TRAINER = "robomimic.scripts.train"
WAYS = ("patched", "plain", "unedited")
UNEDITED = "OBSERVED_UNEDITED"  # a variable: the trainer is to be patched in memory


def way_of(tree: Path) -> str:
    """Return how to run the trainer of a tree: patched on disk, plain, or unedited (patched in memory)."""
    return next((way for way in WAYS if tree.name.endswith(f"-{way}")), "plain")


def activate() -> None:
    """Patch robomimic in memory if the tree is unedited, as `run` does; call it before robomimic is imported."""
    if UNEDITED in os.environ:
        from ddpshim.trainers import patching_in_memory  # not at the top: forks may count loaded modules

        is_patched = any(isinstance(finder, patching_in_memory.PatchedFiles) for finder in sys.meta_path)
        assert is_patched or patching_in_memory.patch_program(TRAINER)


def run_trainer() -> None:
    runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)
