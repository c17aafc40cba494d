"""Reads what robomimic logs of a step without stopping for it: the host waits for a GPU at each number that it reads.

Upstream reads the norm of every gradient by itself, 94 in a step of a transformer. Here they are one number, and all
numbers of a step's log come together, while the next step is computed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

import torch

from ddpshim.job.replaced import replaced
from ddpshim.robomimic import known


@contextlib.contextmanager
def all_at_once() -> Iterator[None]:
    """Meanwhile robomimic's `backprop_for_loss`, where it is the one that is known, reads all norms in one. Local."""
    import robomimic.utils.torch_utils as TorchUtils

    upstreams = vars(TorchUtils).get("backprop_for_loss")
    if not hasattr(upstreams, "__code__") or known.digest(upstreams) != known.BACKPROP_DIGEST:
        yield  # it may do something else
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
    """Upstream's, with the same weights and the same sum of squared norms: of a GPU a tensor, which nobody has read."""
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
    # Numbers of Python are added in doubles, one after the other. On a GPU the order is another: the 16th digit.
    return sum(squares.tolist()) if squares.device.type == "cpu" else squares.double().sum()


class Unread(Mapping[str, Any]):
    """The log of a step, of which some numbers are on their way from the device: whoever looks waits for them."""

    def __init__(self, log: Mapping[str, Any]) -> None:
        self._log: Mapping[str, Any] = log
        self._keys = [key for key, value in log.items() if isinstance(value, torch.Tensor) and value.numel() == 1]
        self._came: Optional[torch.cuda.Event] = None
        if self._keys:
            numbers = torch.stack([log[key].detach().double().reshape(()) for key in self._keys])
            self._numbers = numbers.to("cpu", non_blocking=True)  # of a GPU: into pinned memory
            if numbers.is_cuda:
                self._came = torch.cuda.Event()
                self._came.record(torch.cuda.current_stream(numbers.device))

    def _read(self) -> Mapping[str, Any]:
        if self._keys:
            if self._came is not None:
                self._came.synchronize()
            self._log, self._keys = {**self._log, **dict(zip(self._keys, self._numbers.tolist()))}, []
        return self._log

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._log)

    def __len__(self) -> int:
        return len(self._log)


def later(log_info: Callable[[Any], Mapping[str, Any]], info: Any) -> Unread:
    """What `log_info(info)` returns, with the numbers of which it asked `.item()` still on their way. Local.

    It is called now: what else it looks at (a learning rate) may be another one a step later.
    """
    thread, item = threading.get_ident(), torch.Tensor.item

    def unread(tensor: torch.Tensor) -> Any:
        is_ours = threading.get_ident() == thread and tensor.numel() == 1
        return tensor.detach().double() if is_ours else item(tensor)  # log_info adds some up, as Python does

    with replaced(torch.Tensor, "item", unread):
        return Unread(log_info(info))
