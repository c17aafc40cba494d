"""Checks during training that ranks train one model: watches optimizer steps, and decides when to compare ranks.

A failed check raises SyncError. The option `guard` (DDPSHIM_GUARD=0) turns the checks off.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any, Optional, TypeVar

import torch
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.failures import failure
from ddpshim.job.group import world
from ddpshim.job.news import compared
from ddpshim.model import backward
from ddpshim.model.equality import OPT_OUT, Optimizers, Tensors, facts_of, hash_of, is_milestone, refuse
from ddpshim.process import observed
from ddpshim.process.devices import is_capturing
from ddpshim.process.job import current
from ddpshim.process.observed import observe
from ddpshim.process.random_streams import digest, rank_states, restore_rank_states
from ddpshim.process.say import count, say
from ddpshim.process.users_line import users_line

DEADLINE_S = 120.0  # how long a rank that has ended its epoch, or the job, waits for the others
_IN_A_PASS = zlib.crc32(b"backward pass")
REDUCED = "_ddpshim_reduced"  # set on the gradients of the first step after a reduction, and on those of a file


class Reduced:
    """What wrappers that reduce gradients have in common; those that are not changed have these values.

    They are attributes of the class, because others that are set on a wrapper become its module's.
    """

    module: nn.Module
    num_reductions = 0  # backward passes whose gradients were reduced
    has_unreduced_gradients = False  # a pass ran under no_sync() since
    is_uneven = False  # ranks rightly make different numbers of passes: it trained in join()
    _refusal: Optional[SyncError] = None  # why the last pass was not reduced
    # Whether comparisons over ranks include its buffers; None: there are none, as each rank holds different weights.
    _compares_buffers: Optional[bool] = None

    def _count_reduction(self) -> None:
        """Count a pass whose gradients were reduced; compare ranks now and then (collective)."""
        self.num_reductions, here = self.num_reductions + 1, world()
        is_compared = self._compares_buffers is not None and here.options.guard
        if is_compared and is_milestone(self.num_reductions) and not is_capturing(here.device):
            _compare(self)


class GuardState:
    """The state of the checks in a job: `job.current().part(GuardState)`."""

    def __init__(self) -> None:
        # The wrapper that reduces a parameter's gradient, by its id, which no new one gets: parameters are kept.
        self.owners: dict[int, Reduced] = {}
        self.owned: list[torch.Tensor] = []
        self.companions: list[nn.Module] = []  # not trained, but must be equal
        # The wrappers that an optimizer's last step changed, by id, with their num_reductions.
        self.steps = weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, tuple[Reduced, int]]]()
        # How many steps of all came before an optimizer's first, its number on all ranks.
        self.numbers = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self.num_steps, self.rates = 0, list[float]()  # of optimizers: steps so far, and the last learning rates
        self.is_alone = False  # a rank missed a meeting
        current().before_end.callback(_compare_in_the_end)


def _watched() -> GuardState:
    return current().part(GuardState)


def own(wrapper: Reduced, parameters: Iterable[torch.Tensor]) -> None:
    """Record that `wrapper` reduces the gradients of `parameters`. Local."""
    _watched().owned += (kept := [*parameters])
    _watched().owners.update((id(p), wrapper) for p in kept)


def is_owned(parameter: torch.Tensor) -> bool:
    """Whether a wrapper reduces this parameter's gradient already. Local."""
    return id(parameter) in _watched().owners


def watch_optimizers() -> None:
    """Check every optimizer step of this process until `cleanup()`. Local; called once in a job."""
    observe(current().at_end, before_step=_check_step, after_step=_check_closure)


N = TypeVar("N", bound=nn.Module)


def watch(module: N) -> N:
    """Also compare an untrained network (a target, an EMA) over the ranks; returns it. Local.

    Its parameters and buffers must be equal whenever weights are compared: in backward passes 1, 2, 10, 100 and every
    1000, at the end of an epoch and in `cleanup()`. Every rank must name the same networks, in the
    same order, between the same backward passes. With one process it does nothing.
    """
    watched = _watched()
    if not any(module is there for there in watched.companions):
        watched.companions.append(module)
    return module


def optimizers_of(wrapper: Reduced) -> list[torch.optim.Optimizer]:
    """Return optimizers that stepped `wrapper` first, the oldest first; none that shards its state. Local."""
    found = [optimizer for optimizer, steps in _watched().steps.items() if next(iter(steps), None) == id(wrapper)]
    shards = [optimizer for optimizer in found if type(optimizer).__module__.startswith("torch.distributed.optim")]
    apart = [*map(id, shards), *(id(getattr(optimizer, "optim", None)) for optimizer in shards)]  # inside ZeRO's
    return [optimizer for optimizer in found if id(optimizer) not in apart]


def companions() -> Tensors:
    """Return the tensors of the networks given to `watch`, except those that a wrapper reduces. Local."""
    return {
        f"{kind} '{name}' of network {number} of those that are not trained ({type(module).__name__})": tensor
        for number, module in enumerate(_watched().companions)
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, tensor in tensors
        if not is_owned(tensor)
    }


def _compare(wrapper: Reduced) -> None:
    """Raise SyncError on all ranks if they differ; all get the main rank's RNG state if those do (collective)."""
    here, num, network = world(), wrapper.num_reductions, type(wrapper.module).__name__
    settings, tensors = _facts_of(wrapper)
    tensors.update(companions())
    own = hash_of(settings, tensors), digest() if current().door.computes_alike else ""
    of_weights, of_streams = zip(*here.gather(own, "the comparison of weights"))
    if len({*of_streams}) > 1:
        restore_rank_states(here.broadcast(rank_states(here.device)), here.device)
        observed.note("mended", what="RNG state", reductions=num)
        if here.is_main:
            say(
                f"after {num} backward passes RNG states differed between ranks: something uses random numbers on one "
                "rank only (a log, a rollout). All ranks continue with the main rank's RNG state"
            )
    said = ""
    try:
        if len({*of_weights}) > 1:
            settings, tensors = _facts_of(wrapper, _kept())
            refuse(f"after {num} backward passes of {network}", settings, {**tensors, **companions()})
    except SyncError as error:
        said = str(error)
        raise
    finally:
        observed.note("guard", check="weights", network=network, reductions=num, passed=not said, said=said)


def _facts_of(wrapper: Reduced, kept: Optional[Optimizers] = None) -> tuple[dict[str, str], Tensors]:
    optimizers = [one for one in optimizers_of(wrapper) if kept is None or one in kept]
    return facts_of(wrapper.module, bool(wrapper._compares_buffers), optimizers)


def _kept() -> Optimizers:
    """Return the optimizers that all ranks still have: a dead one may live longer on one of them (collective)."""
    own = {number: optimizer for optimizer, number in _watched().numbers.items()}
    of_ranks = world().gather_with_deadline("optimizers", [*own], DEADLINE_S)
    return [own[number] for number in own if all(number in theirs for theirs in of_ranks.values())]


def check_equal_steps(what: str = "the epoch") -> None:
    """Raise SyncError if ranks made different numbers of backward passes, or hold different weights (collective).

    Call it at the end of an epoch, or before a save. `ddpshim.watch` lists what is compared. A rank that is still in a
    step would wait until the group's timeout for gradients that no rank will send; if it does not call this within
    120 s, the others raise. Does nothing with one process or without guards.

    Args:
        what: the name of what has ended, for the error.
    """
    here = world()
    if here.world_size == 1 or not here.options.guard:
        return
    mine = num_reductions()
    of_ranks = here.gather_with_deadline("steps", [mine, hash_of(*_everything())], DEADLINE_S)
    counts = ", ".join(f"{number} on rank {rank}" for rank, (number, _) in of_ranks.items())
    cure = (
        "Give every rank the same number of batches (make_loader does), and skip no step on one rank alone "
        f"({OPT_OUT})."
    )
    missing = [rank for rank in range(here.world_size) if rank not in of_ranks]
    is_good = not missing and len({number for number, _ in of_ranks.values()}) == 1
    said = "" if is_good else f"{what}: {counts}"
    observed.note("guard", check="steps", passed=is_good, said=said, reductions=mine)
    if missing:
        _watched().is_alone = True
        raise SyncError(
            f"ranks {missing} did not reach the end of {what} within {DEADLINE_S:g} s of rank {here.rank}; they "
            f"wait in another step for gradients that no rank will send. Backward passes so far: {counts}. {cure}"
        )
    if not is_good:
        raise SyncError(
            f"ranks made different numbers of backward passes by the end of {what}: {counts}; gradients of "
            f"different steps were averaged with each other. {cure}"
        )
    _refuse_unequal([checksum for _, checksum in of_ranks.values()], what)


def _compare_in_the_end() -> None:
    """Raise SyncError if ranks that leave the job together hold different weights, before `cleanup()` ends anything."""
    here, are_whole = world(), [wrapped._compares_buffers is not None for wrapped in _wrappers()]
    is_compared = any(are_whole) if are_whole else bool(_watched().companions)
    if here.world_size == 1 or not here.options.guard or not is_compared:
        return
    if failure.on_the_way_out() or _watched().is_alone:
        here.gather_with_deadline("the end", None, 0.0)  # so that no rank waits for this one
        return
    of_ranks = here.gather_with_deadline("the end", hash_of(*_everything()), DEADLINE_S)
    missing = [rank for rank in range(here.world_size) if rank not in of_ranks]
    if missing and here.is_main:
        say(f"ranks {missing} did not reach cleanup(): the last weights were not compared")
    if not missing and None not in of_ranks.values():
        _refuse_unequal(list(of_ranks.values()), "the job")


def _refuse_unequal(hashes: list[int], what: str) -> None:
    """Raise SyncError on all ranks if these hashes, one per rank, differ."""
    if len(set(hashes)) > 1:
        refuse(f"at the end of {what}", *_everything(_kept()))


def _everything(kept: Optional[Optimizers] = None) -> tuple[dict[str, str], Tensors]:
    """Return the settings and the tensors that must be equal on all ranks of the job, by name."""
    settings, tensors = dict[str, str](), Tensors()
    for number, wrapper in enumerate(w for w in _wrappers() if w._compares_buffers is not None):
        of = f"of network {number} ({type(wrapper.module).__name__})"
        settings_of_one, tensors_of_one = _facts_of(wrapper, kept)
        settings.update((f"{name} {of}", value) for name, value in settings_of_one.items())
        tensors.update((f"{name} {of}", tensor) for name, tensor in tensors_of_one.items())
    return settings, {**tensors, **companions()}


def num_reductions() -> int:
    """Return how many backward passes of all networks were reduced so far. Local."""
    return sum(wrapped.num_reductions for wrapped in _wrappers() if not wrapped.is_uneven)


def _wrappers() -> list[Reduced]:
    return list({id(wrapped): wrapped for wrapped in _watched().owners.values()}.values())


def compares_passes() -> bool:
    """Whether ranks compare the gradients of a backward pass of a wrapped network. Local."""
    return bool(_watched().owners) and world().options.guard


def agree_on_pass(network: str, gradients: Sequence[int], cure: Optional[str] = None) -> Callable[[], None]:
    """Begin to compare the gradients of this backward pass (collective, does not wait).

    Returns what waits for the others. It raises SyncError on all ranks if they are not in one pass with the same
    gradients. The message is as those of World: a rank that is in another collective sees it, and does not hang.

    Args:
        network: the name of the network, or the names.
        gradients: numbers of the parameters that got a gradient, in order: those of other ranks meet them.
        cure: for the error; default what is to be done in any program.
    """
    here, num_passes = world(), current().part(observed.Progress).num_passes + 1
    num_steps, rates = _watched().num_steps, _watched().rates
    kind = zlib.crc32(repr(gradients).encode())

    def place() -> str:
        told = f"is in backward pass {num_passes}, of {network}, with {count(len(gradients), 'gradient')}, "
        told += f"after {count(num_steps, 'optimizer step')}"
        told += f" (the last at learning rate {', '.join(map(str, rates))})" if rates else ""
        return f"{told}; at {users_line()}"

    wait = compared((zlib.crc32(repr((num_passes, num_steps, rates)).encode(), kind), _IN_A_PASS), place)

    def agreed() -> None:
        if not (where := wait()):
            return
        from ddpshim.failures.failure_notes import SAME_WAY

        ranks = [f"rank {rank} {where.get(rank, 'is in no backward pass')}" for rank in range(here.world_size)]
        raise SyncError(
            "ranks are at different steps, or computed gradients of different parameters; they would be mixed up, and "
            f"ranks would train different models. {'; '.join(ranks)}. {cure or SAME_WAY} ({OPT_OUT})."
        )

    return agreed


def _check_closure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Check a step with a closure afterwards, because the closure computes gradients inside the step."""
    if len(args) > 1 or kwargs.get("closure") is not None:
        _check_step(optimizer, args, kwargs)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise SyncError before a step on gradients that were not reduced over the ranks."""
    # Loops over all parameters run in C: policies have hundreds of parameters, and this runs in every step.
    params: list[Any] = list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))
    gradients: list[Any] = list(map(attrgetter("grad"), params))
    have_gradients = list(map(is_not, gradients, repeat(None)))
    params, gradients = list(compress(params, have_gradients)), list(compress(gradients, have_gradients))
    watched = _watched()
    owners = list(map(watched.owners.get, map(id, params)))
    wrappers: Any = dict(zip(map(id, owners), owners)).values()
    may_be_alone = current().door.computes_alike
    if None in wrappers and not may_be_alone:
        raise _alone(optimizer, params[owners.index(None)])
    rates = [rate for group in optimizer.param_groups if isinstance(rate := group.get("lr"), (int, float))]
    last = watched.steps.setdefault(optimizer, {})
    for wrapped in [wrapped for wrapped in wrappers if wrapped is not None]:
        _check_passes(optimizer, wrapped)
        mine = list(compress(gradients, map(is_, owners, repeat(wrapped))))
        now = wrapped.num_reductions
        if last.get(id(wrapped), (wrapped, 0)) != (wrapped, now):
            last[id(wrapped)] = wrapped, now
            watched.numbers.setdefault(optimizer, watched.num_steps)
            watched.num_steps, watched.rates = watched.num_steps + 1, rates
            deque(map(setattr, mine, repeat(REDUCED), repeat(True)), maxlen=0)
        # Nothing was reduced since this optimizer's last step: the same gradients may be used again, others may not.
        elif not all(map(hasattr, mine, repeat(REDUCED))) and not may_be_alone:
            raise SyncError(
                f"{type(optimizer).__name__}.step(): gradients of {type(wrapped.module).__name__} never went through a "
                f"backward pass (after {now} of them; torch.autograd.grad, or .grad set by hand); they were not "
                "reduced, so ranks would train different models. Call loss.backward(). If they were computed from "
                f"reduced gradients, write them in place: p.grad.copy_(...) ({OPT_OUT})."
            )


def _check_passes(optimizer: torch.optim.Optimizer, wrapped: Reduced) -> None:
    """Raise SyncError before a step if the last backward pass of `wrapped` was not reduced."""
    step, name = f"{type(optimizer).__name__}.step()", type(wrapped.module).__name__
    passes = current().part(backward.Passes)
    if passes.depth:
        raise SyncError(
            f"{step} inside a backward pass (an optimizer in backward, or a hook that steps): gradients are not "
            "reduced until the pass ends, so ranks would train different models. Step after loss.backward(), with one "
            f"optimizer for all parameters ({OPT_OUT})."
        )
    if wrapped._refusal is not None:
        raise wrapped._refusal
    if (unfinished := passes.unfinished()) is not None:
        raise SyncError(
            f"{step}: a backward pass of {unfinished} never finished (an exception inside it was caught?); other ranks "
            "still wait for its gradients. Let the exception end the job."
        )
    if wrapped.has_unreduced_gradients:
        raise SyncError(
            f"{step} after a backward pass of {name} under no_sync() or accumulate(is_last=False); ranks would step "
            "on different gradients. Use neither for the last backward pass before a step."
        )


def _alone(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> SyncError:
    """Return the error for a gradient that no wrapper reduces."""
    groups = enumerate(group["params"] for group in optimizer.param_groups)
    number, position = next((i, j) for i, ps in groups for j, p in enumerate(ps) if p is parameter)
    named = ((w.module, name) for w in _wrappers() for name, p in w.module.named_parameters() if p is parameter)
    module, name = next(named, (None, ""))
    shape = f"shape {tuple(parameter.shape)}, in no wrapped module"
    which = shape if module is None else f"'{name}' of {type(module).__name__}"
    return SyncError(
        f"{type(optimizer).__name__}.step(): parameter {position} of group {number} ({which}) has a gradient that is "
        "this rank's alone; ranks would train different models. Give the module that holds it to wrap_parallel before "
        f"training, and again if it was unfrozen or added after the wrap ({OPT_OUT})."
    )
