"""Ends a job whose ranks train separate models, by an optimizer or by hand, because no gradients were exchanged.

Imports no torch: the program decides when it is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ddpshim import variables
from ddpshim.errors import LaunchError, SyncError
from ddpshim.process.job import current
from ddpshim.process.observed import num_collectives, observe
from ddpshim.process.replaced import after_import

_OTHERS = ("horovod", "mpi4py", "deepspeed", "colossalai", "torch_xla")  # a program may distribute itself with these
_MOST_PASSES = 32  # backward passes that are checked for weights that change by hand
_MOST_NODES, _MOST_WEIGHTS, _MOST_NUMBERS = 1000, 8, 64


class Answer:
    """The state of this check in a job."""

    is_settled = False  # then no step is checked any more
    num_passes = 0  # backward passes that were checked
    weights: Sequence[tuple[Any, Any]] = ()  # some parameters of the last pass, and their first numbers


@functools.cache
def watch() -> None:
    """Check every optimizer step in this process, once it imports torch, until it ends. Local."""
    until = contextlib.ExitStack()
    atexit.register(until.close)
    after_import("torch", lambda: observe(until, backward=check_by_hand, before_step=check_step))


def check_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise SyncError if this is one of several ranks, and nothing has distributed what it trains."""
    answer = current().part(Answer)
    if answer.is_settled or current().has_networks:  # wrap_parallel was called: see model/guard.py
        return
    has_closure = len(args) > 1 or kwargs.get("closure") is not None
    if has_closure or any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        _refuse(f"{type(optimizer).__name__}.step()", answer)


def check_by_hand(tensors: Any) -> None:
    """Raise SyncError if this is one of several ranks, and its weights were changed by hand since the last pass."""
    answer = current().part(Answer)
    if not answer.is_settled and not current().has_networks and answer.num_passes < _MOST_PASSES:
        from torch.nn import Parameter

        answer.num_passes += 1
        if any(not before.equal(_first_numbers(weights)) for weights, before in answer.weights):
            _refuse("weights changed between two backward passes without an optimizer", answer)
        held = (getattr(node, "variable", None) for node in itertools.islice(graph_of(tensors), _MOST_NODES))
        some = itertools.islice((found for found in held if isinstance(found, Parameter)), _MOST_WEIGHTS)
        answer.weights = [(weights, _first_numbers(weights).clone()) for weights in some]


def _first_numbers(weights: Any) -> Any:
    return weights.detach().reshape(-1)[:_MOST_NUMBERS]


def graph_of(tensors: Any) -> Iterator[Any]:
    """Yield the nodes of the graph from which a loss, or several, were computed, the nearest first. Local."""
    losses = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    nodes = [*filter(None, (getattr(loss, "grad_fn", None) for loss in losses))]
    seen = set(nodes)
    for node in nodes:  # it grows in the loop
        yield node
        more = [inner for inner, _ in node.next_functions if inner is not None and inner not in seen]
        nodes += more
        seen.update(more)


def _refuse(found: str, answer: Answer) -> None:
    """Raise SyncError about `found` if this is one of several processes that train separate models. Local."""
    size = _num_alone()
    if size <= 1:
        answer.is_settled = True
        return
    nothing, to_do = "no network was wrapped by wrap_parallel", "Wrap"
    if current().world is None:
        unedited = f"`{variables.UNEDITED}=on python -m ddpshim run --nproc {size}`"
        nothing = "nothing has distributed this program"
        to_do = f"Start an unmodified single-process trainer by {unedited}; or wrap"
    to_do += " its networks with wrap_parallel and its loaders with make_loader (`python -m ddpshim docs MIGRATION`)."
    raise SyncError(
        f"{found}: {nothing}. {size} processes would train {size} separate models, into the same files. {to_do} If "
        "each process is meant to train its own model (a sweep), DDPSHIM_GUARD=0 turns this check off."
    )


def _num_alone() -> int:
    """Return how many processes train separate models; 1 if they do not, or if the user wants that."""
    job = current()
    if job.world is not None:
        before, now = job.num_collectives, num_collectives()
        is_shared = not job.world.options.guard or before is None or now is None or now > before
        return 1 if is_shared else job.world.world_size
    distributed = sys.modules.get("torch.distributed")
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if job.left is not None or has_group or not sys.modules.keys().isdisjoint(_OTHERS):
        return 1
    from ddpshim.options import Options  # here: a program that distributes itself needs neither
    from ddpshim.process.launch_env import read_launch_env

    try:
        size = read_launch_env(os.environ).world_size
    except LaunchError:
        return 1  # `setup` reports it, if the program calls it
    return size if size > 1 and Options.read().guard else 1
