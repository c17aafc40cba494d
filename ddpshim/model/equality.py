"""Says what must be equal across ranks (weights, buffers, optimizers), and in what it differs.

Ranks compare hashes (`hash_of`). Only if they differ do ranks exchange, through the job's store, what tells the
difference (`refuse`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.job.group import world

SAME_STATE = (
    "Build, load and change networks and optimizers equally on every rank, step schedulers with numbers of all ranks, "
    "and let every gradient come from loss.backward()"
)
OPT_OUT = "DDPSHIM_GUARD=0 turns this check off"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
Tensors = dict[str, torch.Tensor]  # by what messages call them
Facts = dict[str, str]  # what messages say of settings and tensors, by name: "is 0.1"

Optimizers = Sequence[torch.optim.Optimizer]
_DEADLINE_S = 120.0  # after a common step ranks are only seconds apart


def is_milestone(number: int) -> bool:
    """Whether to compare in this backward pass: 1, 2, 10, 100 and every 1000. Pass 2 sees the effects of step 1."""
    return number in (1, 2, 10, 100) or (number > 0 and number % 1000 == 0)


def facts_of(module: nn.Module, with_buffers: bool, optimizers: Optimizers) -> tuple[dict[str, str], Tensors]:
    """Return the settings of optimizers, and the tensors that must be equal: their state, and the network's. Local."""
    tensors: Tensors = {f"parameter '{name}'": p for name, p in module.named_parameters()}
    if with_buffers:
        # No row tensor: it is each rank's own.
        tensors.update((f"buffer '{name}'", b) for name, b in module.named_buffers() if type(b) is torch.Tensor)
    settings = {
        f"{key} of group {number} of {type(optimizer).__name__} {i}": repr(_plain(value))
        for i, optimizer in enumerate(optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    return settings, {**tensors, **dict(_state_of(optimizers, module))}


def _state_of(optimizers: Optimizers, module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    names = {id(p): name for name, p in module.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            title = f"of '{names[id(p)]}'" if id(p) in names else f"of parameter {number}"
            yield from _tensors_in(optimizer.state.get(p, {}), f"{title} in {type(optimizer).__name__} {i}")


def _tensors_in(value: Any, title: str) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield title, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(inner, f"{key} {title}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors_in(inner, f"entry {number} {title}")
    elif isinstance(value, (int, float)):
        yield title, torch.tensor(float(value), dtype=torch.float64, device="cpu")


def _plain(value: Any) -> Any:
    """Return a setting without its device, and without addresses of objects, which differ between ranks."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


@torch.no_grad()
def hash_of(settings: Mapping[str, str], tensors: Mapping[str, Optional[torch.Tensor]]) -> int:
    """Return a number for settings and tensors; equal numbers are taken for equal ones. Waits for a GPU. Local.

    Different numbers may still mean equal tensors, if only the bits of NaNs differ.
    """
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        if tensor is not None and _has_bits(tensor):
            sums.setdefault(tensor.device, []).append(_sum_of_bits(tensor))
    kinds = {name: tensor is not None and (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return zlib.crc32(repr((settings, kinds, [torch.stack(one).tolist() for one in sums.values()])).encode())


def _has_bits(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    t = (torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()).contiguous().view(-1)
    size = t.element_size()
    if t.numel() * size % 8:
        return t.view(_INTEGERS[size]).sum(dtype=torch.int64)
    # Eight times as fast. cuDNN puts the weights of a network one after the other in memory, at any place.
    return (t.clone() if t.storage_offset() * size % 8 else t).view(torch.int64).sum()


def refuse(when: str, settings: Mapping[str, str], tensors: Tensors) -> None:
    """Raise SyncError on all ranks, which names their first difference, if it is not in bits of NaNs (collective)."""
    own: Facts = {name: f"is {value}" for name, value in settings.items()}
    own.update((name, fact_of(tensor)) for name, tensor in tensors.items())
    found = described(world().gather_with_deadline("facts", own, _DEADLINE_S))
    if found is not None:
        raise SyncError(
            f"{when} ranks hold different weights or settings: {found}. They train different models, and only the "
            f"main rank's is saved. {SAME_STATE} ({OPT_OUT})."
        )


def described(of_ranks: Mapping[int, Facts]) -> Optional[str]:
    """Describe the first fact that differs, with all ranks' values; None if all are equal (NaNs are). Local."""
    by_name = {name: [of.get(name) for of in of_ranks.values()] for facts in of_ranks.values() for name in facts}
    found = [(name, values) for name, values in by_name.items() if any(value != values[0] for value in values)]
    if not found:
        return None
    name, values = found[0]
    on_ranks = (f"{value or 'missing'} on rank {rank}" for rank, value in zip(of_ranks, values))
    more = f" ({len(found) - 1} more differ)" if len(found) > 1 else ""
    return f"{name} {', '.join(on_ranks)}{more}"


def fact_of(tensor: torch.Tensor) -> str:
    """Return the sum of a tensor, and its kind and a checksum, since sums may be equal. Local. All NaNs are equal."""
    t, kind = tensor.detach(), f"{tensor.dtype} {tuple(tensor.shape)}"
    if not _has_bits(t):
        return f"is {kind}"
    if t.is_complex():
        t = torch.view_as_real(t)
    if t.is_floating_point() and t.element_size() > 1:
        t = torch.nan_to_num(t)
    total = (t.to(torch.float64) if t.element_size() == 1 else t).sum(dtype=torch.float64)
    bits = t.view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64)
    return f"sums to {total.item()!r} ({kind}, #{int(bits) % 2**64:x})"
