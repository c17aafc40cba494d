"""Compares the config, the code files and the version of torch between ranks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddpshim.errors import WorldError
from ddpshim.job.group import world


def check_same_experiment(config: Mapping[str, Any], package: str) -> None:
    """Raise WorldError, on all ranks, where a value of `config` or a file of the code is not the main rank's.

    Collective. The code is what is imported of `package` and of ddpshim.
    """
    here, settings, code = world(), _flattened(config), _code(package)
    mains, mains_code = here.broadcast((settings, code))
    # Of the code what both have imported: a rank may need less.
    pairs = [(name, mains.get(name, "absent"), settings.get(name, "absent")) for name in {**mains, **settings}]
    pairs += [(name, mains_code[name], code[name]) for name in code if name in mains_code]
    everyones = here.gather([pair for pair in pairs if pair[1] != pair[2]])
    for rank, found in enumerate(everyones):
        if found:
            said = ", ".join(f"{name} is {main} on rank 0 and {odd} on rank {rank}" for name, main, odd in found[:3])
            more = f", and {len(found) - 3} more differ" if len(found) > 3 else ""
            raise WorldError(
                f"{said}{more}; ranks would train different experiments, or hang. Give every rank the same config "
                "file and the same installation."
            )


def _flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The values of nested mappings by dotted name, as text."""
    flattened = {}
    for key, value in config.items():
        is_section = isinstance(value, Mapping) and value
        flattened.update(_flattened(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": repr(value)})
    return flattened


def _code(package: str) -> dict[str, str]:
    """A digest of each imported file of `package` and of ddpshim, by its name, and the version of torch."""
    roots = [Path(sys.modules[name].__path__[0]).resolve() for name in (package, "ddpshim")]
    imported = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    # Thousands of files: to resolve and compare them all would take every start half a second.
    files = {Path(path).resolve() for path in imported if package in path or "ddpshim" in path}
    digests = {
        str(file.relative_to(root.parent)): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for root in roots
        for file in sorted(files)
        if root in file.parents and file.suffix == ".py"
    }
    return {**digests, "the version of torch": torch.__version__}
