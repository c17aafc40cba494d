"""Runs the robomimic trainer of a tree of `tests.equivalence.copy_release` the way that its name says."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import runpy
import sys
from pathlib import Path

WAYS = ("patched", "plain", "unedited", "hooked")
UNEDITED = "OBSERVED_UNEDITED"  # the way, where ddpshim.auto is to be imported
COPY = "own_train.py"  # beside the package: a trainer of the user's own, for "hooked"


def way_of(tree: Path) -> str:
    """How the trainer of that tree is run: patched on disk, plain, unedited (patched in memory) or hooked."""
    return next((way for way in WAYS if tree.name.endswith(f"-{way}")), "plain")


def activate() -> None:
    """Import ddpshim.auto, where the tree is for it; before anything of robomimic."""
    if UNEDITED in os.environ:
        importlib.import_module("ddpshim.auto")


def preload(everything: bool = False) -> None:
    """Have algorithms imported as `activate` would have them, in a process that is forked before it is called.

    Or `everything`, where a test imports files of the trainer before it runs the trainer.
    """
    if UNEDITED in os.environ:
        from ddpshim.trainers.patching.in_memory import PatchedFiles  # whoever is forked may ask what ddpshim loads

        spec = importlib.util.find_spec("robomimic")
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            is_library = functools.partial(_starts, "" if everything else "robomimic.algo.")
            sys.meta_path.insert(0, PatchedFiles(Path(folder), is_library=is_library))


def _starts(prefix: str, name: str) -> bool:
    return name.startswith(prefix)


def run_trainer() -> None:
    """Be the trainer, with the arguments in sys.argv."""
    if os.environ.get(UNEDITED) == "hooked":
        package = importlib.import_module("robomimic").__path__[0]
        runpy.run_path(str(Path(package).with_name(COPY)), run_name="__main__")
    else:
        runpy.run_module("robomimic.scripts.train", run_name="__main__", alter_sys=True)
