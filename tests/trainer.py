"""Runs the robomimic trainer of a tree from `tests.equivalence.copy_release`, in the way that its name states."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import runpy
import sys
from pathlib import Path

WAYS = ("patched", "plain", "unedited", "hooked")
UNEDITED = "OBSERVED_UNEDITED"  # a variable with the way, if ddpshim.auto must be imported
COPY = "own_train.py"  # beside the package: a user's own trainer, for "hooked"


def way_of(tree: Path) -> str:
    """Return how to run the trainer of a tree: patched on disk, plain, unedited (patched in memory) or hooked."""
    return next((way for way in WAYS if tree.name.endswith(f"-{way}")), "plain")


def activate() -> None:
    """Import ddpshim.auto if the tree is unedited or hooked; call it before robomimic is imported."""
    if UNEDITED in os.environ:
        importlib.import_module("ddpshim.auto")


def preload(everything: bool = False) -> None:
    """Import algorithms as after `activate`, in a process that is forked before `activate` is called.

    `everything`: import all of robomimic so, for a test that imports the trainer's files before it runs the trainer.
    """
    if UNEDITED in os.environ:
        from ddpshim.trainers.patching.in_memory import PatchedFiles  # not at the top: forks may count loaded modules

        spec = importlib.util.find_spec("robomimic")
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            is_library = functools.partial(_starts, "" if everything else "robomimic.algo.")
            sys.meta_path.insert(0, PatchedFiles(Path(folder), is_library=is_library))


def _starts(prefix: str, name: str) -> bool:
    return name.startswith(prefix)


def run_trainer() -> None:
    """Run the trainer, with the arguments in sys.argv."""
    if os.environ.get(UNEDITED) == "hooked":
        package = importlib.import_module("robomimic").__path__[0]
        runpy.run_path(str(Path(package).with_name(COPY)), run_name="__main__")
    else:
        runpy.run_module("robomimic.scripts.train", run_name="__main__", alter_sys=True)
