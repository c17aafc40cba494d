"""Makes a wrapper look like its module: attributes, names, keys, copies."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Callable

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_PREFIXES = ("module", "_orig_mod")  # which DataParallel, DDP and torch.compile put before their child's keys


def is_compiling() -> bool:
    """Whether torch compiles the caller. Local."""
    ask = getattr(torch.compiler, "is_compiling", None)  # torch 2.1 lacks it, and has a graph break here
    return ask is not None and ask()


def _of_module(function: Callable[..., Any]) -> Any:
    """Return a method that calls `function` of the module in the wrapper's place."""
    return lambda wrapper, *args: function(wrapper.module, *args)


class Transparent:
    """A wrapper that has its module's parameters, children, attributes and keys, under the same names.

    It shares the module's dictionaries instead of holding it as a child, so every traversal (`named_parameters`, an
    EMA, a parent's `state_dict`) finds the same tree as in the bare module.
    """

    module: nn.Module
    _autocast: Any = None  # with the option `precision`: returns the context of `forward` in training mode

    def _show(self, module: nn.Module) -> None:
        mine = self.__dict__
        # The hooks too: a parent that loads runs the hooks of its child, which is the wrapper.
        shared = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_load_state_dict_post_hooks")
        for name in shared:
            mine[name] = getattr(module, name)
        mine["module"] = module
        own = {*vars(module), *module._parameters, *module._buffers, *module._modules}
        for name in {*own, *dir(type(module))}:
            theirs = getattr(type(module), name, None)
            is_its = name in own or (callable(theirs) and theirs is not getattr(nn.Module, name, None))
            if is_its and not name.startswith("_") and name not in Transparent.__dict__ and hasattr(type(self), name):
                mine[name] = getattr(module, name)  # a child called `join`, an attribute `gather`, a method

    def __getattr__(self, name: str) -> Any:
        if "module" not in self.__dict__:
            # While torch's constructor runs, attributes are in the wrapper's own dictionaries.
            return nn.Module.__getattr__(self, name)  # type: ignore[arg-type]
        return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "module" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            nn.Module.__setattr__(self, name, value)  # type: ignore[arg-type]
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode; this is the module's flag, not a copy."""
        return self.module.training if "module" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__:
            self.module.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._autocast is None or not self.module.training:
            return self._run(*args, **kwargs)
        with self._autocast():
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        self.module.train(mode)
        return self

    def eval(self) -> Any:
        self.module.eval()
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        self.module.apply(fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.module._apply(*args, **kwargs)
        return self

    def no_sync(self) -> Any:
        """Return a context in which gradients only accumulate; in one process it changes nothing."""
        return contextlib.nullcontext()

    def accumulate(self, is_last: bool) -> Any:
        """Return a context for one of several backward passes before a step; only the last one reduces gradients.

        k equal parts of a batch, each with its loss divided by k, give the gradients of the whole batch with one
        reduction instead of k:
        `for i, part in enumerate(parts): with net.accumulate(is_last=i == k - 1): (loss(part) / k).backward()`.
        """
        return contextlib.nullcontext() if is_last else self.no_sync()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the bare module's state with its keys, on any number of ranks."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state_dict with the keys of the bare module, of DataParallel, of DDP or of torch.compile."""
        new = new_keys(state_dict, self.module)
        return self.module.load_state_dict({new[key]: x for key, x in state_dict.items()}, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        # Called when a parent module loads: keys below `prefix` belong to this module, in the caller's own dict.
        mine = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
        renamed = {old: new for old, new in new_keys(mine, self.module).items() if new != old}
        values = {new: state_dict.pop(prefix + old) for old, new in renamed.items()}
        state_dict.update({prefix + new: value for new, value in values.items()})
        self.module._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # Of containers.
    __getitem__ = _of_module(operator.getitem)
    __setitem__ = _of_module(operator.setitem)
    __contains__ = _of_module(operator.contains)
    __iter__, __len__ = _of_module(iter), _of_module(len)

    def __bool__(self) -> bool:
        try:
            return bool(self.module)
        except TypeError:  # torch.compile's module always defines __len__, which may raise
            return True

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __prepare_scriptable__(self) -> nn.Module:
        return self.module  # for torch.jit.script

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Unpickles to the bare module; the file does not refer to ddpshim.
        return operator.getitem, ([self.module], 0)


class BareModule(Transparent, nn.Module):
    """The wrapper for one process, or for a module with nothing to reduce: the same interface, and no reduction."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._show(module)


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
    for prefix in (f"{name}." for name in _PREFIXES):
        if all(key.startswith(prefix) and key[len(prefix) :] in own for key in keys):
            return {key: key[len(prefix) :] for key in keys}
    by_bare: dict[str, list[str]] = {}
    for key in own:
        by_bare.setdefault(bare_key(key), []).append(key)
    candidates = {key: [key] if key in own else by_bare.get(bare_key(key), []) for key in keys}
    return {key: found[0] if len(found) == 1 else key for key, found in candidates.items()}


def bare_key(key: str) -> str:
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
