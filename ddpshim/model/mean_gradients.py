"""Averages gradients over the ranks, where every rank runs the same program on whole batches (`setup(batch="global")`).

These lines, which one can copy into any trainer, give the same gradients:

    for p in network.parameters():
        p.register_post_accumulate_grad_hook(lambda p: (p.grad.div_(world_size), dist.all_reduce(p.grad)))

What follows sends many gradients in one message, while the backward pass goes on. Since ranks run one program, they
get gradients of the same parameters in the same order, so that messages need no names and no parameter is unused on
one rank only; `agree_on_pass` raises where that is not so. Only public hooks of torch are used.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn

from ddpshim.job.collectives import Buffers, broadcast_state
from ddpshim.job.news import Habit
from ddpshim.job.world import world
from ddpshim.model import backward, guard
from ddpshim.model.wrapper import BareModule
from ddpshim.process.devices import is_capturing
from ddpshim.process.job import current
from ddpshim.process.observed import Progress
from ddpshim.process.replaced import replaced


class MeanGradients(guard.Reduced, BareModule):
    """A network whose gradients are averaged over the ranks. Made by `wrap_parallel`."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float, broadcast_buffers: bool) -> None:
        super().__init__(module)
        broadcast_state(module)
        reduced = [p for p in module.parameters() if p.requires_grad and not guard.is_owned(p)]
        mine = self.__dict__
        mine["_syncs"], mine["_postponed"] = True, dict[int, Any]()  # parameters of passes under no_sync, by id
        mine["_device"], mine["_sent_buffers"] = reduced[0].device, Buffers(module, broadcast_buffers)
        guard.own(self, reduced)
        current().part(Means).add(self, reduced, int(bucket_cap_mb * 2**20))
        self._compares_buffers = broadcast_buffers

    @property
    def has_unreduced_gradients(self) -> bool:  # type: ignore[override]
        return bool(self._postponed)

    def no_sync(self) -> Any:
        """Return a context in which gradients accumulate on each rank; the next pass outside it averages the sum."""
        return replaced(self, "_syncs", False)


class Means:
    """The gradients of the backward pass that is under way, of all networks of a job."""

    def __init__(self) -> None:
        self._cap = 0
        self._parameters, self._numbers = list[Any](), dict[int, int]()  # of all networks; their places, by id
        self._held: set[int] = set()  # parameters that had a gradient before this pass, by id
        self._taken: dict[int, MeanGradients] = {}  # in this pass, by number, in the order in which gradients came
        self._left = list[Any]()  # taken, not as expected, and to be sent when ranks have agreed
        self._ready, self._num_bytes = list[Any](), 0  # for the next message
        # Messages under way: the work, and gradients with what to write into them when it has ended.
        self._sent: list[tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        self._next: Optional[Iterator[int]] = None  # of the expected parameters; None if ranks do not compare them
        self._habit = Habit()  # the parameters of passes
        passes = current().part(backward.Passes)
        passes.before.append(self._begin)
        passes.after.append(self._finish)
        passes.unfinished = lambda: next((type(network.module).__name__ for network in self.networks_of_pass()), None)

    def add(self, network: MeanGradients, parameters: Sequence[Any], cap: int) -> None:
        """Average the gradients of `parameters` from now on, until `cleanup()`. Local."""
        self._cap = max(self._cap, cap)
        for p in parameters:
            self._numbers[id(p)] = len(self._parameters)
            self._parameters.append(p)  # which also keeps its id from being used again
            current().at_end.callback(p.register_post_accumulate_grad_hook(lambda p: self._take(network, p)).remove)

    def networks_of_pass(self) -> list[MeanGradients]:
        return [*dict.fromkeys(self._taken.values())]

    def _begin(self) -> None:
        """Before a pass, note which gradients it will add to. In C, because it looks at every parameter."""
        gradients = map(operator.attrgetter("grad"), self._parameters)
        self._held = set(itertools.compress(self._numbers, map(operator.is_not, gradients, itertools.repeat(None))))

    def _take(self, network: MeanGradients, p: Any) -> None:
        """Take a gradient that is complete."""
        if p.grad is None:  # a function of the program's gave none
            return
        number = self._numbers[id(p)]
        if not network._syncs:
            network._postponed[number] = p
            return
        if number in self._taken:
            name = next((name for name, other in network.module.named_parameters() if other is p), "?")
            raise backward.second_gradient(f"parameter '{name}' of {type(network.module).__name__}")
        if not self._taken:
            self._next = iter(self._habit.expected()) if world().options.guard else None
        self._taken[number] = network
        if self._next is not None and (self._left or next(self._next, None) != number):
            self._left.append(p)
        else:
            self._add_to_message(p)

    def _add_to_message(self, p: Any) -> None:
        self._ready.append(p)
        self._num_bytes += p.nbytes
        if self._num_bytes >= self._cap:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Send the gradients that are ready, in a message for each dtype (collective, does not wait).

        A new gradient becomes a view of the message, which takes its place in memory. One that existed before the pass
        is written into: others may hold it, as they may in one process.
        """
        by_kind: dict[Any, list[Any]] = {}
        for p in self._ready:
            by_kind.setdefault((p.grad.dtype, p.grad.device, p.grad.layout), []).append(p)
        self._ready, self._num_bytes = [], 0
        for (*_, layout), params in by_kind.items():
            if layout is not torch.strided:
                for p in params:
                    p.grad = p.grad.detach().coalesce().div_(world().world_size)
                    self._sent.append((dist.all_reduce(p.grad, async_op=True), []))
                continue
            gradients = [p.grad.detach() for p in params]
            rows, writes = [*map(_flat, gradients)], list[Any]()
            is_held = [id(p) in self._held or p.grad.requires_grad for p in params]
            message = _in_one_piece(rows, gradients) if all(is_held) else None
            if message is None:
                message = torch.cat(rows)
                for p, held, old, part in zip(params, is_held, gradients, message.split([*map(len, rows)])):
                    mean = _shaped(part, old)
                    if held:
                        writes.append((old, mean))
                    else:
                        p.grad = mean.detach()  # no view for autograd, so that programs may call detach_()
            self._sent.append((dist.all_reduce(message.div_(world().world_size), async_op=True), writes))

    def _finish(self) -> None:
        """At the end of a pass that gave gradients, send the rest, and wait for all means (collective)."""
        if not self._taken:
            return
        progress, networks = current().part(Progress), self.networks_of_pass()
        is_captured = is_capturing(networks[0]._device)
        if world().options.guard and not is_captured:
            numbers = [*self._taken]
            agreed = guard.agree_on_pass(", ".join(type(network.module).__name__ for network in networks), numbers)
            if self._ready and numbers == self._habit.expected():
                self._send()
            agreed()
            self._habit.learn(numbers)
        for network in networks:  # a pass under no_sync may have used parameters that this one did not
            postponed = network._postponed.items()
            more = [p for number, p in postponed if number not in self._taken and p.grad is not None]
            self._held.update(map(id, more))
            self._left += more
            network._postponed.clear()
        for p in self._left:
            self._add_to_message(p)
        self._left = []
        self._send()
        for network in networks:
            network._sent_buffers.start()
        for work, writes in self._sent:
            with progress.waiting():
                work.wait()
            for gradient, mean in writes:
                gradient.copy_(mean)
        for network in networks:
            network._sent_buffers.finish()
        self._sent, self._taken = [], {}
        progress.end_pass(networks[0]._device.type == "cuda" and not is_captured)
        for network in networks:
            network._count_reduction()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of `tensor` as a vector, in the order in which they lie in memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.permute(order_in_memory(tensor)).reshape(-1)


def _shaped(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `_flat(like)` as `like` again: optimizers are slower if its strides are not those of the weight."""
    if like.is_contiguous():
        return vector.view(like.shape)
    order = order_in_memory(like)
    return moved_back(vector.view([like.shape[dim] for dim in order]), order)


def order_in_memory(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions from the one with the largest stride to the one with the smallest. Local."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def moved_back(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return what was permuted by `order` in its own order of dimensions. Local."""
    return tensor.permute([order.index(i) for i in range(tensor.dim())])


def _in_one_piece(rows: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
    """Return the memory of `gradients` as a message; None if they do not lie in it as an earlier pass left them."""
    memory, address = gradients[0].untyped_storage().data_ptr(), gradients[0].data_ptr()
    for row in rows:
        if row.data_ptr() != address or row.untyped_storage().data_ptr() != memory:
            return None
        address += row.nbytes
    return rows[0].as_strided((sum(map(len, rows)),), (1,))
