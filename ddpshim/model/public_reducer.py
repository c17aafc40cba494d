"""Reduces gradients with torch's public API alone, if a torch lacks the private names that activate its reducer.

Buckets, their order and the arithmetic are those of torch's reducer (torch/csrc/distributed/c10d/reducer.cpp), so the
gradients are equal to the last bit. It is slower, because it runs in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch import nn

from ddpshim.job.say import say
from ddpshim.model import agreement, guard, seams
from ddpshim.model.reducer import DistributedModule, is_first

_FIRST_BUCKET_BYTES = 1024 * 1024  # small, so that the first message is sent early


class Bucket:
    """The gradients of some parameters in one message. Has the methods of torch's `dist.GradBucket`.

    A sparse gradient has a bucket of its own.
    """

    def __init__(self, index: int, parameters: Sequence[torch.Tensor], is_sparse: bool) -> None:
        self.number, self.is_the_last, self.is_sparse = index, False, is_sparse
        self._parameters = list(parameters)
        self.missing: set[int] = set()  # the places of gradients that have not arrived
        self.work: Any = None  # of the message being sent
        self.flat = torch.empty(0, device="cpu")
        self.views: list[torch.Tensor] = []
        if not is_sparse:
            first = self._parameters[0]
            self.flat = torch.zeros(sum(p.numel() for p in self._parameters), dtype=first.dtype, device=first.device)
            parts = self.flat.split([p.numel() for p in self._parameters])
            self.views = [_as_laid_out(part, p) for part, p in zip(parts, self._parameters)]

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self.flat.copy_(tensor)

    def gradients(self) -> list[torch.Tensor]:
        return self.views

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.is_the_last


class PublicReducer:
    """Has the methods of torch's reducer that `DistributedModule` calls.

    Args:
        parameters: all that are reduced, in the order in which DDP gives them to its reducer.
        are_sparse: for each parameter, whether its gradient is sparse.
        group: the ranks that share gradients.
        bucket_cap_mb: size of a bucket; None for torch's 25 MB.
        has_views: gradients are views of the buckets.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        are_sparse: Sequence[bool],
        group: Any,
        bucket_cap_mb: Optional[float],
        has_views: bool,
    ) -> None:
        self._parameters, self._group, self._has_views = list(parameters), group, has_views
        self._are_sparse = list(are_sparse)
        self._size = dist.get_world_size(group)
        self._hook: Optional[Callable[[Any, Any], Any]] = None
        self._hook_state: Any = None
        cap = int((seams.BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * 1024 * 1024)
        self._limits = [_FIRST_BUCKET_BYTES if bucket_cap_mb is None else cap, cap]
        self._arrived: list[int] = []  # in this pass
        every = range(len(self._parameters))
        self._make_buckets(reversed(assign(self._parameters, self._are_sparse, every, [sys.maxsize])))

    def _make_buckets(self, places: Iterable[Sequence[int]]) -> None:
        self._buckets = [
            Bucket(number, [self._parameters[i] for i in indices], self._are_sparse[indices[0]])
            for number, indices in enumerate(places)
        ]
        self._buckets[-1].is_the_last = True
        self._places = {id(p): (b, i) for b in self._buckets for i, p in enumerate(b.parameters())}
        self._next = len(self._buckets)  # the first bucket that was not sent yet; at first none is to be sent

    def _rebuild_buckets(self) -> None:
        """Make buckets in the order in which the first rank's gradients arrived in the last pass (collective)."""
        order = torch.tensor(self._arrived, device=self._buckets[0].flat.device)
        dist.broadcast(order, dist.get_global_rank(self._group, 0) if self._group is not None else 0, self._group)
        self._make_buckets(assign(self._parameters, self._are_sparse, order.tolist(), self._limits))
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters(), bucket.views):
                if self._has_views and parameter.grad is not None:
                    parameter.grad = view.copy_(parameter.grad)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Use `hook(state, bucket)` for messages, as DDP does: it returns a Future of the bucket's new content."""
        self._hook, self._hook_state = hook, state

    def prepare_for_backward(self, outputs: Any) -> None:
        """Expect the gradient of every parameter."""
        for bucket in self._buckets:
            bucket.missing, bucket.work = set(range(len(bucket.parameters()))), None
        self._arrived.clear()
        self._next = 0

    def _autograd_hook(self, index: int) -> None:
        """Mark parameter `index` as ready, with or without a gradient; send buckets that are full, in order."""
        if self._next == len(self._buckets):
            return  # under no_sync()
        parameter = self._parameters[index]
        bucket, place = self._places[id(parameter)]
        if place not in bucket.missing:
            raise RuntimeError("a parameter was marked ready twice in one backward pass; its gradient was sent already")
        self._arrived.append(index)
        if not bucket.is_sparse:
            view = bucket.views[place]
            if (parameter.dtype, parameter.device) != (view.dtype, view.device):
                return  # converted after the wrap: `_check_reducer_finalized` raises
            self._lay_down(parameter, view)
        bucket.missing.remove(place)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])
            self._next += 1

    def _lay_down(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        gradient = parameter.grad
        with torch.no_grad():
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() == view.data_ptr() and gradient.numel():
                if self._hook is None:
                    view.div_(self._size)
            elif self._hook is None:
                torch.mul(gradient, 1.0 / self._size, out=view)
            else:
                view.copy_(gradient)
            if gradient is not None and self._has_views:
                parameter.grad = view

    def _send(self, bucket: Bucket) -> None:
        if bucket.is_sparse:
            (parameter,) = bucket.parameters()
            gradient = parameter.grad
            if gradient is None:
                shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
                gradient = torch.zeros(shape, dtype=dtype, device=device).to_sparse()
            bucket.flat = gradient / self._size
        if self._hook is not None and not bucket.is_sparse:
            bucket.work = self._hook(self._hook_state, bucket)
        else:
            bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def _check_reducer_finalized(self) -> None:
        """Wait for all messages and set all gradients. Raises RuntimeError if a bucket was not sent."""
        if self._next < len(self._buckets):
            raise RuntimeError(f"bucket {self._next} of {len(self._buckets)} was not reduced: a gradient is missing")
        for bucket in self._buckets:
            if self._hook is not None and not bucket.is_sparse:
                bucket.set_buffer(bucket.work.wait())
            else:
                bucket.work.wait()
            for parameter, view in zip(bucket.parameters(), bucket.views or [bucket.flat]):
                if bucket.is_sparse or (parameter.grad is None and self._has_views):
                    parameter.grad = view
                elif parameter.grad is None:
                    parameter.grad = view.clone()
                elif parameter.grad is not view:
                    parameter.grad.copy_(view)

    def _remove_autograd_hooks(self) -> None:
        """Do nothing: the hooks belong to `DistributedModule`, which removes them."""


def assign(
    parameters: Sequence[torch.Tensor], are_sparse: Sequence[bool], order: Iterable[int], limits: Sequence[int]
) -> list[list[int]]:
    """Return the indices of the parameters of each bucket, as torch's `compute_bucket_assignment_by_size` does.

    A bucket has one dtype and device. It is full at so many bytes: the first bucket of a kind at `limits[0]`, the next
    at `limits[1]`, and so on; the last limit applies to all others.
    """
    done: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    num_done: dict[Any, int] = {}
    for index in order:
        parameter = parameters[index]
        if are_sparse[index]:
            done.append([index])
            continue
        kind = parameter.dtype, parameter.device
        indices, num_bytes = filling.setdefault(kind, ([], 0))
        indices.append(index)
        num_bytes += parameter.numel() * parameter.element_size()
        filling[kind] = indices, num_bytes
        if num_bytes >= limits[min(num_done.get(kind, 0), len(limits) - 1)]:
            done.append(filling.pop(kind)[0])
            num_done[kind] = num_done.get(kind, 0) + 1
    return [*done, *(indices for indices, _ in filling.values())]


def parameters_of(module: nn.Module, is_owned: Callable[[Any], bool]) -> tuple[list[nn.Parameter], list[bool]]:
    """Return the trained parameters that no wrapper reduces, each once, and whether their gradients are sparse."""
    found: dict[int, tuple[nn.Parameter, bool]] = {}
    for part in module.modules():
        is_sparse = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and bool(part.sparse)
        for parameter in part.parameters(recurse=False):
            if parameter.requires_grad and not is_owned(parameter):
                found.setdefault(id(parameter), (parameter, is_sparse))
    return [p for p, _ in found.values()], [is_sparse for _, is_sparse in found.values()]


def _as_laid_out(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `part` in the shape of `parameter`, with its strides too if they leave no gaps (as in channels_last)."""
    order = sorted(range(parameter.dim()), key=lambda i: (parameter.stride(i), parameter.size(i)))
    expected = 1
    for i in order:
        if parameter.size(i) != 1 and parameter.stride(i) != expected:
            return part.view(parameter.shape)
        expected *= parameter.size(i)
    return part.as_strided(parameter.shape, parameter.stride())


def begin(wrapper: DistributedModule, module: nn.Module, process_group: Any, ddp_options: dict[str, Any]) -> None:
    """Set the attributes of torch's DDP in `wrapper`, with a reducer that uses torch's public API alone. Local."""
    nn.Module.__init__(wrapper)
    mine, (reduced, are_sparse) = wrapper.__dict__, parameters_of(module, guard.is_owned)
    wrapper._modules["module"] = module
    mine.update(process_group=process_group, require_backward_grad_sync=True, device_ids=None, **ddp_options)
    mine["_reduced"], mine["_presence"] = reduced, nn.Parameter(reduced[0].new_zeros(len(reduced) + agreement.NUM))
    mine["device"] = reduced[0].device
    mine["reducer"] = PublicReducer(
        [wrapper._presence, *reduced],
        [False, *are_sparse],
        process_group,
        ddp_options.get("bucket_cap_mb"),
        ddp_options["gradient_as_bucket_view"],
    )
    if is_first() and dist.get_rank() == 0:
        missing = ", ".join(seams.lacking())
        say(
            f"torch {torch.__version__} lacks {missing}; gradients are reduced through its public API: equal to "
            "the last bit, in up to 1.04 times the time per step"
        )
