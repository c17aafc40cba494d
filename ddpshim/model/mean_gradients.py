"""Averages the gradients of a network over the ranks, where every rank runs the same program on whole batches.

Then each rank accumulates the gradients of the same parameters in the same order, so that public hooks are enough: no
parameter is unused on one rank only, and ranks cannot meet in different orders. Gradients are sent while the backward
pass goes on, in messages of some megabytes, as torch's DDP does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn

from ddpshim.job.world import world
from ddpshim.model import backward, guard
from ddpshim.model.broadcasting import Buffers, broadcast_state
from ddpshim.model.equality import Equality, is_milestone
from ddpshim.model.wrapper import BareModule
from ddpshim.process.job import current


class MeanGradients(BareModule):
    """A network whose gradients are averaged over the ranks. Made by `wrap_parallel`."""

    num_reductions = _num_steps = 0
    has_unreduced_gradients = is_armed = False
    _rates: Sequence[float] = ()
    _equality: Optional[Equality] = None
    _buffers_to_send: Optional[Buffers] = None
    _syncs = True

    def __init__(self, module: nn.Module, bucket_cap_mb: float, broadcast_buffers: bool) -> None:
        super().__init__(module)
        broadcast_state(module)
        mine = self.__dict__
        mine["_cap"] = bucket_cap_mb * 2**20
        mine["_ready"], mine["_num_bytes"], mine["_sent"] = list[Any](), 0, list[Any]()
        reduced = [p for p in module.parameters() if p.requires_grad and not guard.is_owned(p)]
        handles = [p.register_post_accumulate_grad_hook(self._take) for p in reduced]
        current().at_end.callback(lambda: [handle.remove() for handle in handles])
        guard.own(self, reduced)
        backward.watch(lambda: None)
        if broadcast_buffers and any(child._buffers for child in module.modules()):
            self._buffers_to_send = Buffers(module)
        if world().options.guard:
            device = reduced[0].device
            self._equality = Equality(
                module, broadcast_buffers, device, lambda: guard.optimizers_of(self), guard.companions
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients accumulate on each rank; the next pass outside it averages the sum."""
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def _take(self, parameter: Any) -> None:
        """Take a gradient that is complete; send those taken so far, if they are enough for a message."""
        if not self._syncs:
            self.has_unreduced_gradients = True
            return
        backward.at_outer_end(self._finish)
        mine = self.__dict__
        if parameter.grad.is_sparse:  # rare, so by itself
            dense = parameter.grad.to_dense().div_(world().world_size)
            dist.all_reduce(dense)
            parameter.grad = dense.to_sparse(parameter.grad.sparse_dim())
            return
        mine["_ready"].append(parameter)
        mine["_num_bytes"] += parameter.grad.numel() * parameter.grad.element_size()
        if mine["_num_bytes"] >= mine["_cap"]:
            self._send()

    def _send(self) -> None:
        mine = self.__dict__
        by_kind: dict[Any, list[torch.Tensor]] = {}
        for p in mine["_ready"]:
            by_kind.setdefault((p.grad.dtype, p.grad.device), []).append(p.grad.detach())
        for gradients in by_kind.values():
            flat = torch.cat([one.reshape(-1) for one in gradients]).div_(world().world_size)
            mine["_sent"].append((dist.all_reduce(flat, async_op=True), flat, gradients))
        mine["_ready"], mine["_num_bytes"] = [], 0

    def _finish(self) -> None:
        """At the end of the pass, send the rest, and write all means into the gradients."""
        self._send()
        mine = self.__dict__
        for work, flat, gradients in mine["_sent"]:
            work.wait()
            for gradient, mean in zip(gradients, flat.split([one.numel() for one in gradients])):
                gradient.copy_(mean.view(gradient.shape))
        mine["_sent"] = []
        self.num_reductions, self.has_unreduced_gradients = self.num_reductions + 1, False
        if self._buffers_to_send is not None:
            self._buffers_to_send.start()
            self._buffers_to_send.finish()
        current().progress.end_pass(False)
        if self._equality is not None and is_milestone(self.num_reductions):
            self._equality.start(self.num_reductions)
