"""Checks while it runs that ranks train one model: equal weights, unequal noise, no step on one rank's gradients.

A check that fails raises; nothing is repaired. The option `guard` (DDPSHIM_GUARD=0) turns them off.
"""

from __future__ import annotations

import contextlib
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any, Optional, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpshim.errors import SyncError
from ddpshim.job import events
from ddpshim.job.group import draws_alike, on_cleanup, world
from ddpshim.job.job import current
from ddpshim.model import backward

_OPT_OUT = "DDPSHIM_GUARD=0 turns this check off"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_STEPS_DEADLINE_S = 120.0  # after a step that they made together ranks are seconds apart
_MARK = "_ddpshim_stepped"  # set on gradients that were there at a step after a reduction


class Reduced(Protocol):
    """What the checks ask of a wrapper that reduces gradients."""

    module: nn.Module
    has_unreduced_gradients: bool
    num_reductions: int

    @property
    def is_armed(self) -> bool: ...

    def check_equality(self) -> None: ...


class Watched:
    """What is watched in a job: `job.current().part(Watched)`."""

    def __init__(self) -> None:
        # Which wrapper reduces a parameter's gradient, by the parameter's id: tensors compare by element, and a
        # wrapper keeps its parameters alive until it disowns them.
        self.owners: dict[int, Reduced] = {}
        self.num_changes = 1  # of owners, so far
        self.companions: list[nn.Module] = []  # not reduced, and to be equal all the same
        self.steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
        self.hooks = contextlib.ExitStack()  # of optimizers, while they are registered
        self.sees_optimizers = False

    def unwatch_optimizers(self) -> None:
        self.hooks.close()
        self.sees_optimizers = False
        self.steps.clear()


def _watched() -> Watched:
    return current().part(Watched)


class _Steps:
    """What is remembered of an optimizer from its last step to the next."""

    def __init__(self) -> None:
        self.at: dict[int, tuple[Reduced, int]] = {}  # the wrappers that it stepped, by id, and their num_reductions
        self.owner: Optional[Reduced] = None  # the one that reduces all of its parameters, if there is one
        self._params: list[Any] = []
        self._num_changes = 0

    def is_known(self, params: list[Any]) -> bool:
        """Whether its parameters, and who reduces them, are those of the step before; takes note where not."""
        watched = _watched()
        same = self._num_changes == watched.num_changes and len(params) == len(self._params)
        if same and all(map(is_, params, self._params)):
            return True
        self._params, self._num_changes = params, watched.num_changes
        owners = list(map(watched.owners.get, map(id, params)))
        self.owner = owners[0] if owners and all(map(is_, owners, repeat(owners[0]))) else None
        return False


def own(wrapper: Reduced, parameters: Iterable[torch.Tensor]) -> None:
    """Take note that `wrapper` reduces these gradients. Local."""
    watched = _watched()
    watched.num_changes += 1
    watched.owners.update((id(p), wrapper) for p in parameters)


def disown(parameters: Iterable[torch.Tensor]) -> None:
    """Forget who reduces these gradients. Local."""
    watched = _watched()
    watched.num_changes += 1
    for p in parameters:
        watched.owners.pop(id(p), None)


def owner_of(parameter: torch.Tensor) -> Optional[Reduced]:
    """The wrapper that reduces this parameter's gradient, if there is one. Local."""
    return _watched().owners.get(id(parameter))


def is_owned(parameter: torch.Tensor) -> bool:
    """Whether a wrapper reduces this parameter's gradient already. Local."""
    return id(parameter) in _watched().owners


def watch_optimizers() -> None:
    """Have every optimizer step in this process checked, until `cleanup()`. Local."""
    watched = _watched()
    if not watched.sees_optimizers:
        watched.sees_optimizers = True
        watched.hooks.callback(register_optimizer_step_pre_hook(_check_step).remove)
        watched.hooks.callback(register_optimizer_step_post_hook(_check_closure).remove)
        on_cleanup(watched.unwatch_optimizers)


def also_watch(*modules: nn.Module) -> None:
    """Have the weights of networks that nobody reduces (a target, an EMA) compared with those of the first wrapper.

    Local, but every rank must name the same networks, in the same order, between the same backward passes.
    """
    companions = _watched().companions
    companions.extend(module for module in modules if not any(module is there for there in companions))


def check_equal_steps(what: str = "the epoch", deadline_s: float = _STEPS_DEADLINE_S) -> None:
    """Raise SyncError where ranks have made different numbers of backward passes; for the end of an epoch (collective).

    A rank that is still in a step waits there for gradients that nobody will send, until the group's timeout: if
    it does not come here within `deadline_s` the others end the job. Nothing with one process or without guards.

    Args:
        what: the error's name for what ends here.
        deadline_s: how long ranks wait for each other, in seconds; default 120.
    """
    here = world()
    if here.world_size == 1 or not here.options.guard:
        return
    mine = sum(wrapped.num_reductions for wrapped in _wrappers())
    came = here.meet("steps", mine, deadline_s)
    counts = ", ".join(f"{count} on rank {rank}" for rank, count in came.items())
    cure = f"Give every rank equally many batches (make_loader does), and skip no step on one rank alone ({_OPT_OUT})."
    missing = [rank for rank in range(here.world_size) if rank not in came]
    is_good = not missing and len(set(came.values())) == 1
    events.note("guard", check="steps", passed=is_good, said="" if is_good else f"{what}: {counts}", reductions=mine)
    if missing:
        raise SyncError(
            f"ranks {missing} did not come to the end of {what} within {deadline_s:g} s of rank {here.rank}; they wait "
            f"in another step for gradients that nobody will send. Backward passes so far: {counts}. {cure}"
        )
    if len(set(came.values())) > 1:
        raise SyncError(
            f"ranks made different numbers of backward passes until the end of {what}: {counts}; gradients of "
            f"different steps were added to each other. {cure}"
        )


def _wrappers() -> list[Reduced]:
    return list({id(wrapped): wrapped for wrapped in _watched().owners.values()}.values())


class Equality:
    """The comparison of weights and random streams over the ranks of one wrapper's group.

    `start` sends a checksum of each tensor while training goes on, `finish` reads what came back: nobody
    waits for it, and ranks that meet several wrappers in different orders do not block each other.
    """

    def __init__(
        self,
        module: nn.Module,
        buffer_homes: list[tuple[nn.Module, str]],
        group: Any,
        device: torch.device,
        is_first: bool,
        is_on: bool,
    ) -> None:
        """Of `module`, its buffers at `buffer_homes`, and with `is_first` of `also_watch`'s networks (collective).

        Checksums travel on `device`. Every rank must hold as many tensors: torch's DDP has compared them by now.
        """
        self._module, self._group, self._device, self._is_first = module, group, device, is_first
        self._num_seeds = 0  # rows that are to differ
        self._buffers = [(home, name) for home, name in buffer_homes if home._buffers.get(name) is not None]
        self._names = [name for name, _ in module.named_parameters()]
        self._ranks: list[int] = dist.get_process_group_ranks(group)
        self._sent: Any = None  # (work, names, what each rank sent, num_reductions), while it is on its way
        # A rank that leaves the others alone in a later collective would hang them.
        vote = torch.tensor([int(is_on)], device=device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=group)
        self.is_on = bool(vote.item()) and len(self._ranks) > 1

    def is_due(self, num_reductions: int) -> bool:
        """Whether to compare after this many reductions: 1, 10, 100 and every 1000."""
        return self.is_on and (num_reductions in (1, 10, 100) or num_reductions % 1000 == 0)

    def start(self, num_reductions: int) -> None:
        """Send this rank's checksums (collective, does not wait)."""
        self._num_seeds = 0 if draws_alike() else 2 if self._device.type == "cuda" else 1
        names, rows = zip(*self._rows())
        with torch.no_grad():
            mine = torch.stack([torch.stack([x.to(self._device) for x in row]) for row in rows])
        everyones = [torch.empty_like(mine) for _ in self._ranks]
        work = dist.all_gather(everyones, mine, group=self._group, async_op=True)
        self._sent = (work, names, [mine, *everyones], num_reductions)

    def finish(self) -> None:
        """Raise SyncError, on all ranks, where what `start` sent was not as it should be."""
        if self._sent is None:
            return
        (work, names, (_, *everyones), num_reductions), self._sent = self._sent, None
        work.wait()
        kind = type(self._module).__name__
        compared = {"check": "weights", "network": kind, "reductions": num_reductions, "tensors": len(names)}
        try:
            self._compare(names, [everyone.tolist() for everyone in everyones], kind, num_reductions)
        except SyncError as error:
            events.note("guard", passed=False, said=str(error), **compared)
            raise
        events.note("guard", passed=True, **compared)

    def _compare(self, names: Sequence[str], table: list[list[list[int]]], kind: str, num_reductions: int) -> None:
        """Raise SyncError where the rows of the ranks, in `table`, differ that must not, or do not that must."""
        differing = [i for i in range(self._num_seeds, len(names)) if len({rows[i][0] for rows in table}) > 1]
        if differing:
            i = differing[0]
            values = ", ".join(f"{self._value(rows[i])} on rank {rank}" for rank, rows in zip(self._ranks, table))
            raise SyncError(
                f"after {num_reductions} backward passes of {kind} ranks hold different weights: {names[i]} "
                f"{values}{f' ({len(differing) - 1} more tensors differ)' if len(differing) > 1 else ''}. From here on "
                "they train different models. Load checkpoints, change weights, convert and add layers on every rank "
                f"alike, and let every gradient come from loss.backward() ({_OPT_OUT})."
            )
        for i in range(self._num_seeds):
            by_seed: dict[int, list[int]] = {}
            for rank, rows in zip(self._ranks, table):
                by_seed.setdefault(rows[i][0], []).append(rank)
            for seed, ranks in by_seed.items():
                if len(ranks) > 1:
                    raise SyncError(
                        f"ranks {ranks} draw from the same random stream ({names[i]} is {seed}); they add the same "
                        "noise and drop the same units, as if there were fewer samples. Seed before wrap_parallel, "
                        "by ddpshim.setup(seed=), or afterwards with a seed that differs by rank. Where equal noise "
                        f"is meant, draw it inside ddpshim.shared_random_streams(seed) ({_OPT_OUT})."
                    )

    def _rows(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """What is compared, by name: two ints each, one that counts and one to show."""
        device = self._device
        seeds = {"torch.initial_seed()": torch.initial_seed()} if self._num_seeds else {}
        if self._num_seeds > 1:
            seeds["torch.cuda.initial_seed()"] = torch.cuda.initial_seed()
        for name, seed in seeds.items():
            yield name, [torch.tensor((seed + 2**63) % 2**64 - 2**63, device=device)] * 2  # as an int64
        now = dict(self._module.named_parameters())
        for name in self._names:
            yield f"parameter '{name}'", checksum(now.pop(name, None), device)
        for home, name in self._buffers:
            yield f"buffer '{name}' of a {type(home).__name__}", checksum(home._buffers.get(name), device)
        # One row for all of these: how many they are may differ between ranks.
        first = next(iter(now), None)
        added = "the parameters added after wrap_parallel" + ("" if first is None else f" (here first: '{first}')")
        yield added, _checksum_of_all(now.items(), device)
        if self._is_first:
            for number, module in enumerate(_watched().companions):
                seen = [(name, p) for name, p in module.named_parameters() if not is_owned(p)]
                title = f"network {number} of those that are not trained ({type(module).__name__})"
                yield title, _checksum_of_all(seen, device)

    @staticmethod
    def _value(row: list[int]) -> str:
        """A tensor's sum, and its checksum for sums that look alike."""
        if row[0] == 0:
            return "missing"
        total = struct.unpack("d", struct.pack("q", row[1]))[0]
        return f"sums to {total!r} (#{row[0] % 65521:04x})"


def checksum(tensor: Optional[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Two int64: a sum over the bits, dtype and shape included, and the bits of the float64 sum. Zeros for None."""
    if tensor is None:
        return [torch.zeros((), dtype=torch.int64, device=device)] * 2
    t = tensor.detach()
    kind = (zlib.crc32(f"{t.dtype} {tuple(t.shape)}".encode()) + 1) << 24
    if t.layout != torch.strided or t.is_meta or t.is_quantized:
        return [torch.tensor(kind, device=device), torch.zeros((), dtype=torch.int64, device=device)]
    if t.is_complex():
        t = torch.view_as_real(t)
    if t.is_floating_point() and t.element_size() > 1:
        t = torch.nan_to_num(t)  # one NaN is as good as another, whatever its payload
    bits = t.view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64) + kind
    shown = t.to(torch.float64) if t.element_size() == 1 else t
    return [bits.to(device), shown.sum(dtype=torch.float64).view(torch.int64).to(device)]


def _checksum_of_all(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> list[torch.Tensor]:
    """The same for any number of named tensors, in one."""
    bits, shown = checksum(None, device)
    for name, tensor in tensors:
        one, total = checksum(tensor, device)
        bits = bits * 31 + one + zlib.crc32(name.encode())
        shown = (shown.view(torch.float64) + total.view(torch.float64)).view(torch.int64)
    return [bits, shown]


def _check_closure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A closure makes its gradients inside the step: look at them afterwards."""
    if len(args) > 1 or kwargs.get("closure") is not None:
        _check_step(optimizer, args, kwargs)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before a step whose gradients were not reduced over the ranks."""
    # Every line that goes through all parameters does so in C: policies have hundreds, and this is in every step.
    params = list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))
    gradients: list[Any] = list(map(attrgetter("grad"), params))
    stepped = _watched().steps
    before = stepped.get(optimizer)
    if before is None:
        before = stepped[optimizer] = _Steps()
    for wrapped, mine in _by_owner(optimizer, before, params, gradients):
        _check_reduced(optimizer, wrapped)
        key, now = id(wrapped), wrapped.num_reductions
        last = before.at.get(key)
        if last is None or last[0] is not wrapped or last[1] != now:
            before.at[key] = (wrapped, now)
            deque(map(setattr, mine, repeat(_MARK), repeat(True)), maxlen=0)
        # Nothing was reduced since this optimizer's last step. The same gradients again are no news; others are.
        elif not all(map(hasattr, mine, repeat(_MARK))):
            raise SyncError(
                f"{type(optimizer).__name__}.step(): gradients of {type(wrapped.module).__name__} were replaced since "
                f"the last step without a backward pass (after {now} of them; torch.autograd.grad, or .grad set by "
                "hand); they are this rank's alone, and ranks would train different models. Call loss.backward(). If "
                f"they were made from reduced gradients, write them in place: p.grad.copy_(...) ({_OPT_OUT})."
            )


def _by_owner(
    optimizer: torch.optim.Optimizer, before: _Steps, params: list[Any], gradients: list[Any]
) -> list[tuple[Reduced, Iterable[torch.Tensor]]]:
    """Each wrapper that reduces some of the `gradients` (those that are there), and which."""
    if before.is_known(params) and before.owner is not None and all(map(is_not, gradients, repeat(None))):
        return [(before.owner, gradients)]
    present = list(map(is_not, gradients, repeat(None)))
    params, gradients = list(compress(params, present)), list(compress(gradients, present))
    owners = list(map(_watched().owners.get, map(id, params)))
    for p in compress(params, map(is_, owners, repeat(None))):
        raise _alone(optimizer, p)
    distinct: Any = dict(zip(map(id, owners), owners)).values()
    return [(wrapped, list(compress(gradients, map(is_, owners, repeat(wrapped))))) for wrapped in distinct]


def _check_reduced(optimizer: torch.optim.Optimizer, wrapped: Reduced) -> None:
    step, name = f"{type(optimizer).__name__}.step()", type(wrapped.module).__name__
    backward.check_step(optimizer)
    if wrapped.is_armed:
        raise SyncError(
            f"{step}: a backward pass of {name} never finished (an exception inside it was caught?); its peers "
            "still wait for its gradients. Let the exception end the job."
        )
    if wrapped.has_unreduced_gradients:
        raise SyncError(
            f"{step} after a backward pass of {name} under no_sync() or accumulate(is_last=False); ranks would step "
            "on different gradients. Leave them for the last backward pass before a step."
        )
    if wrapped.num_reductions == 0:
        raise SyncError(
            f"{step}: the gradients of {name} never went through a backward pass (torch.autograd.grad, or .grad "
            f"set by hand); ranks would train different models. Call loss.backward() ({_OPT_OUT})."
        )
    wrapped.check_equality()


def _alone(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> SyncError:
    """The error for a gradient that no wrapper reduces."""
    groups = enumerate(group["params"] for group in optimizer.param_groups)
    number, position = next((i, j) for i, ps in groups for j, p in enumerate(ps) if p is parameter)
    return SyncError(
        f"{type(optimizer).__name__}.step(): parameter {position} of group {number} ({_describe(parameter)}) has a "
        "gradient that is this rank's alone; ranks would train different models. Pass the module that holds it to "
        f"wrap_parallel before training, again if it was unfrozen or added after the wrap ({_OPT_OUT})."
    )


def _describe(parameter: torch.Tensor) -> str:
    """The parameter's name where a wrapped module knows it, else its shape."""
    for wrapped in _wrappers():
        for name, other in wrapped.module.named_parameters():
            if other is parameter:
                return f"'{name}' of {type(wrapped.module).__name__}"
    return f"shape {tuple(parameter.shape)}, in no wrapped module"
