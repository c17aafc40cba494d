"""Checks during training that ranks train one model: watches optimizer steps, and decides when to compare ranks.

A failed check raises SyncError. The option `guard` (DDPSHIM_GUARD=0) turns the checks off.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections import deque
from collections.abc import Iterable
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any, Callable, Optional, Protocol, TypeVar

import torch
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.failures import failure
from ddpshim.job.group import on_cleanup, world
from ddpshim.model import backward
from ddpshim.model.checksums import bits_of_rows, numbers_of
from ddpshim.model.equality import OPT_OUT, Equality
from ddpshim.process.job import current
from ddpshim.process.observed import observe
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say

_END_DEADLINE_S = 120.0
STEPS_DEADLINE_S = 120.0  # after a common step ranks are only seconds apart
_MOST_WAYS_TO_WRITE = 16  # each triggers a comparison; if every step differs, only milestones do
REDUCED = "_ddpshim_reduced"  # set on the gradients of the first step after a reduction, and on those of a file


class Reduced(Protocol):
    """The interface of a wrapper that reduces gradients, as the checks need it."""

    module: nn.Module
    has_unreduced_gradients: bool
    num_reductions: int
    _num_steps: int
    _rates: list[float]
    _equality: Equality

    @property
    def is_armed(self) -> bool: ...

    def check_equality(self) -> None: ...


class Watched:
    """The state of the checks in a job: `job.current().part(Watched)`."""

    def __init__(self) -> None:
        # Which wrapper reduces a parameter's gradient, by the parameter's id: tensors compare by element, and a
        # wrapper keeps its parameters alive until it disowns them.
        self.owners: dict[int, Reduced] = {}
        self.num_changes = 1  # of `owners`, so far
        self.companions: list[nn.Module] = []  # not trained, but must be equal
        self.num_asked = 0  # how often this rank requested a comparison of weights
        self.steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
        self.hooks = contextlib.ExitStack()  # removes the hooks of optimizers
        self.sees_optimizers = False
        self.is_alone = False  # a rank missed a meeting

    def unwatch_optimizers(self) -> None:
        self.hooks.close()
        self.sees_optimizers = False
        self.steps.clear()


def _watched() -> Watched:
    return current().part(Watched)


class _Steps:
    """A record of an optimizer's last step, for the checks of its next one."""

    def __init__(self) -> None:
        self.at: dict[int, tuple[Reduced, int]] = {}  # wrappers stepped, by id, with their num_reductions
        self.owner: Optional[Reduced] = None  # the wrapper of all its parameters, if one reduces them all
        self._params: list[Any] = []
        self._num_changes = 0
        self._versions: dict[int, int] = {}  # sum of the gradients' versions, by their number
        self._writes: set[int] = set()  # by how much that sum grew from step to step, so far

    def is_known(self, params: list[Any]) -> bool:
        """Whether its parameters and their wrappers are those of the previous step; records them if not."""
        watched = _watched()
        same = self._num_changes == watched.num_changes and len(params) == len(self._params)
        if same and all(map(is_, params, self._params)):
            return True
        self._params, self._num_changes = params, watched.num_changes
        owners = list(map(watched.owners.get, map(id, params)))
        self.owner = owners[0] if owners and all(map(is_, owners, repeat(owners[0]))) else None
        return False

    def look_at_writes(self, gradients: Iterable[torch.Tensor]) -> None:
        """Request a comparison if gradients were written in place a new number of times. Local."""
        versions = list(map(attrgetter("_version"), gradients))
        # They are views of buckets. A step that leaves some out changes the sum, but writes in no other way: so one sum
        # is kept for each number of gradients.
        now, num = sum(versions), len(versions)
        written, self._versions[num] = now - self._versions.get(num, 0), now
        if written not in self._writes and len(self._writes) < _MOST_WAYS_TO_WRITE:
            self._writes.add(written)
            if len(self._writes) > 2:  # the first two steps are compared anyway, and show what is usual
                ask()


def own(wrapper: Reduced, parameters: Iterable[torch.Tensor]) -> None:
    """Record that `wrapper` reduces the gradients of `parameters`. Local."""
    watched = _watched()
    watched.num_changes += 1
    watched.owners.update((id(p), wrapper) for p in parameters)


def disown(parameters: Iterable[torch.Tensor]) -> None:
    """Forget which wrappers reduce the gradients of `parameters`. Local."""
    watched = _watched()
    watched.num_changes += 1
    for p in parameters:
        watched.owners.pop(id(p), None)


def owner_of(parameter: torch.Tensor) -> Optional[Reduced]:
    """Return the wrapper that reduces this parameter's gradient, or None. Local."""
    return _watched().owners.get(id(parameter))


def is_owned(parameter: torch.Tensor) -> bool:
    """Whether a wrapper reduces this parameter's gradient already. Local."""
    return id(parameter) in _watched().owners


def watch_optimizers() -> None:
    """Check every optimizer step of this process until `cleanup()`. Local."""
    watched = _watched()
    if not watched.sees_optimizers:
        watched.sees_optimizers = True
        observe(watched.hooks, before_step=_check_step, after_step=_check_closure)
        watched.hooks.enter_context(replaced(torch, "save", _asking(torch.save)))
        on_cleanup(watched.unwatch_optimizers)
        compare_in_the_end()


def compare_in_the_end() -> None:
    """Make `cleanup()` compare the ranks before it ends anything. Local."""
    if current().next_number("comparison in the end") == 0:
        current().before_end.callback(_compare_in_the_end)


N = TypeVar("N", bound=nn.Module)


def watch(module: N) -> N:
    """Also compare an untrained network (a target, an EMA) over the ranks; returns it. Local.

    Its parameters and buffers must be equal whenever weights are compared: at steps 1, 2, 10, 100 and every 1000,
    after a `torch.save`, at the end of an epoch and in `cleanup()`. Every rank must name the same networks, in the
    same order, between the same backward passes. With one process it does nothing.
    """
    watched = _watched()
    if not any(module is there for there in watched.companions):
        watched.companions.append(module)
        compare_in_the_end()
    return module


def ask() -> None:
    """Request a comparison of weights in the next backward pass; one rank's request is enough. Local."""
    _watched().num_asked += 1


def num_asked() -> int:
    """Return how often this rank has called `ask`. Local."""
    return _watched().num_asked


def optimizers_of(wrapper: Reduced) -> list[torch.optim.Optimizer]:
    """Return optimizers that stepped `wrapper` first, the oldest first; none that shards its state. Local."""
    found = [optimizer for optimizer, steps in _watched().steps.items() if next(iter(steps.at), None) == id(wrapper)]
    shards = [optimizer for optimizer in found if type(optimizer).__module__.startswith("torch.distributed.optim")]
    apart = [*map(id, shards), *(id(getattr(optimizer, "optim", None)) for optimizer in shards)]  # inside ZeRO's
    return [optimizer for optimizer in found if id(optimizer) not in apart]


def companions() -> dict[str, list[tuple[str, Optional[torch.Tensor]]]]:
    """Return the tensors of each network given to `watch`, except those that a wrapper reduces, by title. Local."""
    return {
        f"network {number} of those that are not trained ({type(module).__name__})": [
            *((name, p) for name, p in module.named_parameters() if not is_owned(p)),
            *module.named_buffers(),
        ]
        for number, module in enumerate(_watched().companions)
    }


def refuse_unequal(hashes: list[int], what: str) -> None:
    """Raise SyncError on all ranks if these hashes, one per rank, differ."""
    if len(set(hashes)) > 1:
        from ddpshim.model.difference import first_difference
        from ddpshim.process.remedies import remedy

        facts = {name: numbers_of(row) for name, row in _rows().items()}
        found = first_difference(world().gather_with_deadline("facts", {**_settings(), **facts}, STEPS_DEADLINE_S))
        if found is None:  # only NaNs with different bits
            return
        raise SyncError(
            f"at the end of {what} ranks hold different weights: {found}. They have trained different models, and "
            f"only the main rank's is saved. {remedy('same state')} ({OPT_OUT})."
        )


def hash_of_all() -> int:
    """Return a hash of everything that must be equal on all ranks of the job."""
    rows = _rows()
    bits = bits_of_rows(list(rows.values()), torch.device("cpu"))
    return zlib.crc32(repr([_settings(), [*rows], bits.tolist()]).encode())


def _rows() -> dict[str, Any]:
    """Return the tensors that must be equal on all ranks of the job, by name."""
    of_networks = (
        (f"{name} of network {number} ({type(equality.module).__name__})", row)
        for number, equality in enumerate(_compared())
        for name, row in equality.rows()
    )
    return {**dict(of_networks), **companions()}


def _settings() -> dict[str, str]:
    return {
        f"{name} of network {number} ({type(equality.module).__name__})": value
        for number, equality in enumerate(_compared())
        for name, value in equality.settings().items()
    }


def _compared() -> list[Equality]:
    every = [wrapped._equality for wrapped in _wrappers()]
    return [equality for equality in every if equality.covers_all and equality.is_on]


def _compare_in_the_end() -> None:
    """Raise SyncError if ranks that leave the job together hold different weights."""
    here, wrappers = world(), _wrappers()
    if here.world_size == 1 or not here.options.guard or (wrappers and not any(w._equality.is_on for w in wrappers)):
        return
    if failure.on_the_way_out() or _watched().is_alone:
        here.gather_with_deadline("the end", None, 0.0)  # so that no rank waits for this one
        return
    of_ranks = here.gather_with_deadline("the end", hash_of_all(), _END_DEADLINE_S)
    missing = [rank for rank in range(here.world_size) if rank not in of_ranks]
    if missing and here.is_main:
        say(f"ranks {missing} did not reach cleanup(): the last weights were not compared")
    if not missing and None not in of_ranks.values():
        refuse_unequal(list(of_ranks.values()), "the job")


def num_reductions() -> int:
    """Return how many backward passes of all networks were reduced so far. Local."""
    return sum(wrapped.num_reductions for wrapped in _wrappers())


def _asking(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def asking(*args: Any, **kwargs: Any) -> Any:
        ask()
        return save(*args, **kwargs)

    return asking


def _wrappers() -> list[Reduced]:
    return list({id(wrapped): wrapped for wrapped in _watched().owners.values()}.values())


def _check_closure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Check a step with a closure afterwards, because the closure computes gradients inside the step."""
    if len(args) > 1 or kwargs.get("closure") is not None:
        _check_step(optimizer, args, kwargs)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise SyncError before a step on gradients that were not reduced over the ranks."""
    # Loops over all parameters run in C: policies have hundreds of parameters, and this runs in every step.
    params = list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))
    gradients: list[Any] = list(map(attrgetter("grad"), params))
    rates = [rate for group in optimizer.param_groups if isinstance(rate := group.get("lr"), (int, float))]
    stepped = _watched().steps
    before = stepped.get(optimizer)
    if before is None:
        before = stepped[optimizer] = _Steps()
    for wrapped, mine in _by_owner(optimizer, before, params, gradients):
        _check_reduced(optimizer, wrapped, mine)
        key, now = id(wrapped), wrapped.num_reductions
        last = before.at.get(key)
        if last is None or last[0] is not wrapped or last[1] != now:
            before.at[key] = (wrapped, now)
            wrapped._num_steps += 1
            wrapped._rates = rates
            before.look_at_writes(mine)
            deque(map(setattr, mine, repeat(REDUCED), repeat(True)), maxlen=0)
        # Nothing was reduced since this optimizer's last step: the same gradients may be used again, others may not.
        elif not all(map(hasattr, mine, repeat(REDUCED))) and not current().holds_whole_batches:
            raise SyncError(
                f"{type(optimizer).__name__}.step(): gradients of {type(wrapped.module).__name__} were replaced "
                f"since the last step without a backward pass (after {now} of them; torch.autograd.grad, or .grad "
                "set by hand); they were not reduced, so ranks would train different models. Call loss.backward(). "
                f"If they were computed from reduced gradients, write them in place: p.grad.copy_(...) ({OPT_OUT})."
            )


def _by_owner(
    optimizer: torch.optim.Optimizer, before: _Steps, params: list[Any], gradients: list[Any]
) -> list[tuple[Reduced, Iterable[torch.Tensor]]]:
    """Return each wrapper that reduces some of the `gradients` (None is skipped), with those that it reduces."""
    if before.is_known(params) and before.owner is not None and all(map(is_not, gradients, repeat(None))):
        return [(before.owner, gradients)]
    present = list(map(is_not, gradients, repeat(None)))
    params, gradients = list(compress(params, present)), list(compress(gradients, present))
    owners = list(map(_watched().owners.get, map(id, params)))
    for p in () if current().holds_whole_batches else compress(params, map(is_, owners, repeat(None))):
        raise _alone(optimizer, p)
    distinct: Any = [owner for owner in dict(zip(map(id, owners), owners)).values() if owner is not None]
    return [(wrapped, list(compress(gradients, map(is_, owners, repeat(wrapped))))) for wrapped in distinct]


def _check_reduced(optimizer: torch.optim.Optimizer, wrapped: Reduced, mine: Iterable[torch.Tensor]) -> None:
    step, name = f"{type(optimizer).__name__}.step()", type(wrapped.module).__name__
    backward.check_step(optimizer)
    if wrapped.is_armed:
        raise SyncError(
            f"{step}: a backward pass of {name} never finished (an exception inside it was caught?); other ranks "
            "still wait for its gradients. Let the exception end the job."
        )
    if wrapped.has_unreduced_gradients:
        raise SyncError(
            f"{step} after a backward pass of {name} under no_sync() or accumulate(is_last=False); ranks would step "
            "on different gradients. Use neither for the last backward pass before a step."
        )
    if wrapped.num_reductions == 0 and not (current().holds_whole_batches or all(map(hasattr, mine, repeat(REDUCED)))):
        raise SyncError(
            f"{step}: the gradients of {name} never went through a backward pass (torch.autograd.grad, or .grad "
            f"set by hand); ranks would train different models. Call loss.backward() ({OPT_OUT})."
        )
    wrapped.check_equality()


def _alone(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> SyncError:
    """Return the error for a gradient that no wrapper reduces."""
    groups = enumerate(group["params"] for group in optimizer.param_groups)
    number, position = next((i, j) for i, ps in groups for j, p in enumerate(ps) if p is parameter)
    return SyncError(
        f"{type(optimizer).__name__}.step(): parameter {position} of group {number} ({_describe(parameter)}) has a "
        "gradient that is this rank's alone; ranks would train different models. Give the module that holds it to "
        f"wrap_parallel before training, and again if it was unfrozen or added after the wrap ({OPT_OUT})."
    )


def _describe(parameter: torch.Tensor) -> str:
    """Return the parameter's name if a wrapped module has it, else its shape."""
    for wrapped in _wrappers():
        for name, other in wrapped.module.named_parameters():
            if other is parameter:
                return f"'{name}' of {type(wrapped.module).__name__}"
    return f"shape {tuple(parameter.shape)}, in no wrapped module"
