"""Observes a trainer from outside: at its end each rank writes its optimizers' parameters and states to $FIELD_PROBE.

With FIELD_NUDGED=1, the weights are one unit in the last place larger after the first step.
With FIELD_CUDA=cpu, the device "cuda" is the CPU: some trainers support no other.
With FIELD_OLDER=1, numpy, Python and torch have names that are no longer there: some trainers pin older versions.
With FIELD_SEED=MODULE, the generators get a seed after the import of the module: some trainers set none.
With FIELD_FLOAT64=1, new tensors are of float64, to see whether a difference is rounding.
With FIELD_INSTEAD=MODULE:OTHER,..., the module OTHER replaces one of the trainer's, such as its simulator.
With FIELD_EMPTY=MODULE,..., every name in these modules is None: they are imported, but not used.
"""

import atexit
import collections.abc
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import itertools
import os
import random
import sys

# Saved before they are replaced: the observed program must not notice this file's own writes.
_OPEN, _WRITE, _CLOSE = os.open, os.write, os.close
RANK = os.environ.get("RANK", "0")
OPTIMIZERS = {}  # by id, kept alive until the end


def _watch_optimizers(module):
    def stepped(optimizer, args, kwargs):
        if id(optimizer) not in OPTIMIZERS and os.environ.get("FIELD_NUDGED"):
            _nudge(p for group in optimizer.param_groups for p in group["params"])
        OPTIMIZERS[id(optimizer)] = optimizer

    module.register_optimizer_step_post_hook(stepped)
    atexit.register(_write)


def _nudge(parameters):
    import torch

    for p in parameters:
        p.data.copy_(torch.nextafter(p.data, torch.full_like(p.data, float("inf"))))


def _modules_stay(module):
    module.Module.cuda = lambda self, device=None: self


def _tensors_stay(module):
    from torch.overrides import handle_torch_function, has_torch_function_unary

    move = module.Tensor.to

    @functools.wraps(move)
    def to(self, *args, **kwargs):
        args, kwargs = map(_on_cpu, args), _on_cpu(kwargs)
        if has_torch_function_unary(self):  # a subclass sees the function that it knows, `torch.Tensor.to`
            return handle_torch_function(to, (self,), self, *args, **kwargs)
        return move(self, *args, **kwargs)

    module.Tensor.cuda = lambda self, *args, **kwargs: self
    module.Tensor.to = to


def _made_on_cpu(module):
    make = module.tensor
    module.tensor = lambda *args, **kwargs: make(*args, **_on_cpu(kwargs))


def _on_cpu(value):
    if isinstance(value, dict):
        return {name: _on_cpu(inner) for name, inner in value.items()}
    return "cpu" if str(value).startswith("cuda") else value


def _older_numpy(module):
    module.bool, module.int, module.float = bool, int, float


def _older_torch(module):
    module._accumulate = itertools.accumulate


def _seeded(module):
    import numpy
    import torch

    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(1)


def _write():
    import torch

    if not OPTIMIZERS:
        return
    states = [
        {
            "weights": [p.detach().clone() for group in optimizer.param_groups for p in group["params"]],
            "optimizer": [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]],
            "lr": [float(group["lr"]) for group in optimizer.param_groups],
        }
        for optimizer in OPTIMIZERS.values()
    ]
    buffer = io.BytesIO()
    torch.save(states, buffer)
    descriptor = _OPEN(
        os.path.join(os.environ["FIELD_PROBE"], f"rank_{RANK}.pt"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    )
    left = memoryview(buffer.getvalue())
    while left:
        left = left[_WRITE(descriptor, left) :]
    _CLOSE(descriptor)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions with modules after their import."""

    def __init__(self, actions):
        self.actions = actions

    def find_spec(self, name, path, target=None):
        actions = [action for module, action in self.actions if module == name]
        if not actions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader
        execute = loader.exec_module

        def execute_and_act(module):
            execute(module)
            for action in actions:
                action(module)

        loader.exec_module = execute_and_act
        return spec


class _Instead(importlib.abc.MetaPathFinder):
    """Imports other modules under some names."""

    def __init__(self, others):
        self.others = others

    def find_spec(self, name, path, target=None):
        if name not in self.others:
            return None
        origin = importlib.machinery.PathFinder.find_spec(self.others[name]).origin
        return importlib.util.spec_from_file_location(name, origin)


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules in which every name is None."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path, target=None):
        found = name in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def exec_module(self, module):
        module.__getattr__ = lambda name: None


def _listed(variable):
    return [name for name in os.environ.get(variable, "").split(",") if name]


sys.meta_path.insert(0, _Instead(dict(pair.split(":") for pair in _listed("FIELD_INSTEAD"))))
sys.meta_path.insert(0, _Empty(_listed("FIELD_EMPTY")))
ACTIONS = []
if "FIELD_PROBE" in os.environ:
    ACTIONS.append(("torch.optim.optimizer", _watch_optimizers))
if os.environ.get("FIELD_CUDA") == "cpu":
    ACTIONS += [("torch.nn.modules.module", _modules_stay), ("torch", _tensors_stay), ("torch", _made_on_cpu)]
if "FIELD_OLDER" in os.environ:
    collections.Mapping = collections.abc.Mapping
    ACTIONS += [("numpy", _older_numpy), ("torch._utils", _older_torch)]
if "FIELD_FLOAT64" in os.environ:
    ACTIONS.append(("torch", lambda module: module.set_default_dtype(module.float64)))
ACTIONS += [(name, _seeded) for name in _listed("FIELD_SEED")]
sys.meta_path.insert(0, _AfterImport(ACTIONS))
