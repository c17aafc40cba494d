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
    """Raise WorldError, on all ranks, if a value of `config` or a code file of a rank differs from the main rank's.

    Collective. The code files are the imported files of `package` and of ddpshim.
    """
    here, settings, code = world(), _flattened(config), _code(package)
    mains, mains_code = here.broadcast((settings, code))
    # Only files that both ranks have imported: a rank may import fewer.
    pairs = [(name, mains.get(name, "absent"), settings.get(name, "absent")) for name in {**mains, **settings}]
    pairs += [(name, mains_code[name], code[name]) for name in code if name in mains_code]
    everyones = here.gather([pair for pair in pairs if pair[1] != pair[2]])
    for rank, found in enumerate(everyones):
        if found:
            odd = ", ".join(f"{name} is {main} on rank 0 and {own} on rank {rank}" for name, main, own in found[:3])
            more = f", and {len(found) - 3} more differ" if len(found) > 3 else ""
            raise WorldError(
                f"{odd}{more}; ranks would train different experiments, or hang. Give every rank the same config "
                "file and the same installation."
            )


def _flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of nested mappings as text, by dotted name."""
    flattened = {}
    for key, value in config.items():
        is_section = isinstance(value, Mapping) and value
        flattened.update(_flattened(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": repr(value)})
    return flattened


def _code(package: str) -> dict[str, str]:
    """Return {file name: digest} of the imported files of `package` and ddpshim, and the version of torch."""
    roots = [Path(sys.modules[name].__path__[0]).resolve() for name in (package, "ddpshim")]
    imported = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    # Filtered by name first: resolving all imported files, thousands, would take half a second at every start.
    files = {Path(path).resolve() for path in imported if package in path or "ddpshim" in path}
    digests = {
        str(file.relative_to(root.parent)): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for root in roots
        for file in sorted(files)
        if root in file.parents and file.suffix == ".py"
    }
    return {**digests, "the version of torch": torch.__version__}
