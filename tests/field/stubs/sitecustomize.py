"""Observes a trainer from outside: at its end each rank writes its optimizers' parameters and states to $FIELD_PROBE.

With FIELD_NUDGED=1, the weights are one unit in the last place larger after the first step.
With FIELD_CUDA=cpu, `.cuda()` does not move modules and tensors: some trainers support no other device.
With FIELD_NUMPY=1.22, numpy has the name `bool`, removed in 1.24: some trainers pin an older numpy.
With FIELD_INSTEAD=MODULE:OTHER, the module OTHER replaces one of the trainer's, its simulator.
"""

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import sys

# Saved before they are replaced: the observed program must not notice this file's own writes.
_OPEN, _WRITE, _CLOSE = os.open, os.write, os.close
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
    module.Tensor.cuda = lambda self, *args, **kwargs: self


def _as_in_1_22(module):
    module.bool = bool


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
    rank = os.environ.get("RANK", "0")
    descriptor = _OPEN(
        os.path.join(os.environ["FIELD_PROBE"], f"rank_{rank}.pt"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    )
    left = memoryview(buffer.getvalue())
    while left:
        left = left[_WRITE(descriptor, left) :]
    _CLOSE(descriptor)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module after its import."""

    def __init__(self, actions):
        self.actions = actions

    def find_spec(self, name, path, target=None):
        if name not in self.actions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader, action = spec.loader, self.actions[name]
        execute = loader.exec_module

        def execute_and_act(module):
            execute(module)
            action(module)

        loader.exec_module = execute_and_act
        return spec


class _Instead(importlib.abc.MetaPathFinder):
    """Imports the module `other` under the name `name`."""

    def __init__(self, name, other):
        self.name, self.other = name, other

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        origin = importlib.machinery.PathFinder.find_spec(self.other).origin
        return importlib.util.spec_from_file_location(name, origin)


if "FIELD_INSTEAD" in os.environ:
    sys.meta_path.insert(0, _Instead(*os.environ["FIELD_INSTEAD"].split(":")))
ACTIONS = {}
if "FIELD_PROBE" in os.environ:
    ACTIONS["torch.optim.optimizer"] = _watch_optimizers
if os.environ.get("FIELD_CUDA") == "cpu":
    ACTIONS.update({"torch.nn.modules.module": _modules_stay, "torch._tensor": _tensors_stay})
if os.environ.get("FIELD_NUMPY") == "1.22":
    ACTIONS["numpy"] = _as_in_1_22
if ACTIONS:
    sys.meta_path.insert(0, _AfterImport(ACTIONS))
