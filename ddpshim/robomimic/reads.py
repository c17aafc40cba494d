"""Reads the numbers that robomimic logs of a step without waiting for the GPU at each of them.

Upstream reads the norm of every gradient separately, 94 in a step of a transformer. Here they are summed on the GPU,
and all numbers of a step's log are copied together, while the next step is computed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

import torch

from ddpshim.process.replaced import replaced
from ddpshim.robomimic import known


@contextlib.contextmanager
def all_at_once() -> Iterator[None]:
    """In this block, robomimic's `backprop_for_loss` reads all norms at once, if its code is known. Local."""
    import robomimic.utils.torch_utils as TorchUtils

    upstreams = vars(TorchUtils).get("backprop_for_loss")
    if not hasattr(upstreams, "__code__") or known.digest(upstreams) != known.BACKPROP_DIGEST:
        yield  # unknown code may do something else
        return
    with replaced(TorchUtils, "backprop_for_loss", backprop_for_loss):
        yield


def backprop_for_loss(
    net: torch.nn.Module,
    optim: torch.optim.Optimizer,
    loss: torch.Tensor,
    max_grad_norm: Optional[float] = None,
    retain_graph: bool = False,
) -> Any:
    """Do the same as upstream's; the returned sum of squared norms is, on a GPU, a tensor that has not been read."""
    optim.zero_grad()
    loss.backward(retain_graph=retain_graph)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm)
    gradients = [p.grad.detach() for p in net.parameters() if p.grad is not None]
    total = _sum_of_squares(gradients)  # before the step: an optimizer may write to gradients
    optim.step()
    return total


def _sum_of_squares(gradients: list[torch.Tensor]) -> Any:
    kinds = {(g.device, g.dtype, g.layout) for g in gradients}
    if len(kinds) != 1 or gradients[0].is_sparse:
        return sum(g.norm(2).pow(2).item() for g in gradients)
    squares = torch.stack(torch._foreach_norm(gradients, 2)).pow(2)
    # Python adds doubles one after the other; a GPU adds in another order, which changes the 16th digit.
    return sum(squares.tolist()) if squares.device.type == "cpu" else squares.double().sum()


class Unread(Mapping[str, Any]):
    """The log of a step, some of whose numbers are still being copied from the device; reading it waits for them."""

    def __init__(self, log: Mapping[str, Any]) -> None:
        self._log: Mapping[str, Any] = log
        self._keys = [key for key, value in log.items() if isinstance(value, torch.Tensor) and value.numel() == 1]
        self._copied: Optional[torch.cuda.Event] = None
        if self._keys:
            numbers = torch.stack([log[key].detach().double().reshape(()) for key in self._keys])
            self._numbers = numbers.to("cpu", non_blocking=True)  # from a GPU: into pinned memory
            if numbers.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(numbers.device))

    def _read(self) -> Mapping[str, Any]:
        if self._keys:
            if self._copied is not None:
                self._copied.synchronize()
            self._log, self._keys = {**self._log, **dict(zip(self._keys, self._numbers.tolist()))}, []
        return self._log

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._log)

    def __len__(self) -> int:
        return len(self._log)


def later(log_info: Callable[[Any], Mapping[str, Any]], info: Any) -> Unread:
    """Return `log_info(info)`, but copy the tensors that it reads with `.item()` without waiting for them. Local.

    `log_info` is called now: other values that it reads, such as a learning rate, may change in the next step.
    """
    thread, item = threading.get_ident(), torch.Tensor.item

    def unread(tensor: torch.Tensor) -> Any:
        is_ours = threading.get_ident() == thread and tensor.numel() == 1
        return tensor.detach().double() if is_ours else item(tensor)  # as Python floats: log_info adds some up

    with replaced(torch.Tensor, "item", unread):
        return Unread(log_info(info))
