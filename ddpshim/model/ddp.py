"""torch's DistributedDataParallel, which other methods of the network than forward pass through as well."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpshim.model import guard
from ddpshim.model.wrapper import Transparent


class DistributedModule(guard.Reduced, Transparent, DistributedDataParallel):
    """DDP with the attributes and keys of its module. Made by `wrap_parallel`.

    A method that the program calls on the wrapper in training mode, such as `compute_loss`, runs inside DDP's forward,
    which prepares its reducer (an idea of Lightning Fabric). Called on `.module`, it would reduce nothing: the next
    step of an optimizer then says so.
    """

    def __init__(self, module: nn.Module, **ddp: Any) -> None:
        DistributedDataParallel.__init__(self, module, process_group=torch.distributed.group.WORLD, **ddp)
        self._modules.pop("module")
        self._show(module)
        guard.own(self, [p for p in module.parameters() if p.requires_grad])

    def __getattr__(self, name: str) -> Any:
        found = Transparent.__getattr__(self, name)
        module = self.__dict__.get("module")
        is_own = callable(found) and getattr(found, "__self__", None) is module and not name.startswith("_")
        if module is None or not is_own or not module.training or hasattr(nn.Module, name):
            return found
        return functools.partial(self._through_forward, found)

    def _through_forward(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `method` of the module as DDP calls its forward."""
        module = self.module
        if not torch.is_grad_enabled() or "forward" in vars(module):  # inside a call already
            return method(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            del module.forward
            return method(*args, **kwargs)

        module.forward = forward
        return self(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_reductions += self.require_backward_grad_sync
        return DistributedDataParallel.forward(self, *args, **kwargs)

    def no_sync(self) -> Any:
        """Return a context in which gradients accumulate on each rank; the next pass outside it reduces the sum."""
        return DistributedDataParallel.no_sync(self)
