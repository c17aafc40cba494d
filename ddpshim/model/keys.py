"""Finds the network inside wrappers, and its keys in a state_dict that another wrapper wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpshim.model.wrapper import Transparent

_PREFIXES = ("module", "_orig_mod")  # which DataParallel, DDP and torch.compile put before their child's keys


def new_keys(keys: Iterable[str], module: nn.Module) -> dict[str, str]:
    """Return for each key of a state_dict the one that `module` has for it, whichever wrapper wrote it. Local.

    Whole path segments are compared, never substrings, and a key that the module has is not changed, so a child named
    `module` keeps its name. Unknown keys are kept, so that torch reports them.

    >>> new_keys(["module.weight", "module.bias"], nn.Linear(1, 1))
    {'module.weight': 'weight', 'module.bias': 'bias'}
    """
    keys, own = list(keys), module.state_dict()
    if all(key in own for key in keys):
        return {key: key for key in keys}
    for prefix in _PREFIXES:
        cut = len(prefix) + 1
        if all(key.startswith(prefix + ".") and key[cut:] in own for key in keys):
            return {key: key[cut:] for key in keys}
    by_bare: dict[str, list[str]] = {}
    for key in own:
        by_bare.setdefault(_bare_key(key), []).append(key)
    candidates = {key: [key] if key in own else by_bare.get(_bare_key(key), []) for key in keys}
    return {key: found[0] if len(found) == 1 else key for key, found in candidates.items()}


def _bare_key(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _PREFIXES)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the network inside ddpshim's and torch's parallel wrappers and torch.compile, or `module`. Local."""
    inner: Any = module
    while True:
        if isinstance(inner, (Transparent, DistributedDataParallel, DataParallel)):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        else:
            return inner  # type: ignore[no-any-return]
