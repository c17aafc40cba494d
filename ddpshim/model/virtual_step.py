"""Implements `virtual_step`: runs a training step for several virtual ranks in each process, one after another.

Each virtual rank but the first has copies of the objects that the step changes. Trained parameters exist once: their
copies share memory, and an optimizer steps once for all.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Callable, TypeVar

import torch
from torch import nn

from ddpshim.errors import DataError, SyncError
from ddpshim.job import noise, shares
from ddpshim.job.exchange import in_order_of_numbers
from ddpshim.job.group import on_cleanup, world
from ddpshim.job.running import reduce, to_cpu
from ddpshim.job.virtual_rank_scheduler import Turns
from ddpshim.model import exact
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced

T = TypeVar("T")


def virtual_step(step: Callable[..., Any], *objects: Any) -> Callable[..., Any]:
    """Return a callable that runs `step(*objects, *arguments)` for each virtual rank of this process (option `exact`).

    The callable takes the `arguments`: each virtual rank gets its rows of every tensor, array or list in them that has
    one row per sample of the current batch. It returns the mean of the results of `step` over all virtual ranks: a
    number, a tensor, a mapping of these, or None (collective). Without the option it returns the result of `step`.

    >>> import ddpshim
    >>> step = ddpshim.virtual_step(lambda net, x: float(net(x).mean()), nn.Flatten())
    >>> step(torch.ones(4, 2))
    1.0

    Args:
        step: a training step: forward, backward, optimizer, averages of weights. Anything else in it (prints, counts)
            happens once for each virtual rank. Autocast must be entered inside it.
        objects: everything that it changes: networks (after `wrap_parallel`), optimizers, schedules, averages,
            counters. They are copied together (copy.deepcopy), and again after a `load_state_dict` of their networks.

    Raises:
        SyncError: the step trains something that is not in `objects`; virtual ranks draw different amounts of random
            numbers, or make different backward passes; a backward pass outside of a step.
        DataError: the virtual ranks of this process do not divide its batch.
    """
    made: list[Players] = []

    @functools.wraps(step)
    def play(*arguments: Any) -> Any:
        here = current().world
        if here is None or here.options.exact is None:
            return step(*objects, *arguments)
        if not made:
            made.append(Players(objects))
            on_cleanup(made.clear)
        parts = made[0].divided(arguments)
        results = made[0].play(lambda own, i: step(*own, *parts[i]))
        return None if all(result is None for result in results) else _mean_of_all(results)

    return play


def _mean_of_all(results: Sequence[Any]) -> Any:
    return reduce(in_order_of_numbers(world().gather(list(map(to_cpu, results)))), mean=True, like=results[0])


class Players:
    """The virtual ranks of this process. The first one uses `objects` themselves, the others copies.

    Attributes:
        size: the number of virtual ranks.
        copies: the objects of each virtual rank.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        here = world()
        assert here.options.exact is not None
        self.size = here.options.exact // here.world_size
        self.copies: list[tuple[Any, ...]] = [tuple(objects)]
        self._turns = Turns(self.size, here.device, self._begin_turn)
        self._is_stale = True
        self._parts: list[shares.Share] = []
        self._changed = contextlib.ExitStack()  # undoes the changes to the objects, in `close`
        noise.share()
        on_cleanup(self.close)

    def play(self, step: Callable[[tuple[Any, ...], int], T]) -> list[T]:
        """Return `step(own objects, number in this process)` of each virtual rank, run in turns (collective)."""
        at_hand = self._batch_at_hand()
        if self.size == 1:
            return [step(self.copies[0], 0)]
        if torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled():
            raise SyncError(
                "autocast around a step of virtual ranks: torch's autocast holds for one thread, so only the first "
                "virtual rank would use that precision. Enter it inside the step."
            )
        if self._is_stale:
            self.refresh()
        job, computes_gradients = current(), torch.is_grad_enabled()

        def play(i: int) -> T:
            with torch.set_grad_enabled(computes_gradients):  # each thread has its own
                return step(self.copies[i], i)

        self._parts = at_hand.divided(self.size)
        shares.play(None)
        job.turns = self._turns
        try:
            return self._turns.run(play)
        finally:
            job.turns = None
            shares.play(at_hand)

    def divided(self, arguments: T) -> list[T]:
        """Return the `arguments` of each virtual rank of this process: its rows of all batched values. Local.

        Rows are copied to new memory, which is aligned equally on any number of ranks, because the rounding of some
        kernels depends on alignment. Raises DataError if nothing in the arguments has the batch's rows.
        """
        sizes, found = self._batch_at_hand().sizes, [False]

        def part(value: Any, i: int) -> Any:
            if isinstance(value, Mapping):
                return {key: part(item, i) for key, item in value.items()}
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*(part(item, i) for item in value))
            has_rows, is_list = _has_rows(value), isinstance(value, (list, tuple))
            if has_rows and not isinstance(value, Mapping) and value.shape[0] in sizes:
                found[0], own = True, value[i :: self.size]
                is_tensor = isinstance(value, torch.Tensor)
                return own.clone(memory_format=torch.contiguous_format) if is_tensor else own.copy()
            if is_list and len(value) in sizes and not any(map(_has_rows, value)):
                found[0] = True
                return value[i :: self.size]
            return type(value)(part(item, i) for item in value) if is_list else value

        parts = [part(arguments, i) for i in range(self.size)]
        if not found[0]:
            raise DataError(
                "no argument of the step has the batch as its first dimension: every virtual rank would train on "
                "the whole batch. Pass tensors, arrays, lists, or mappings of these."
            )
        return parts

    def refresh(self) -> None:
        """Make new copies of the objects. Local."""
        self.close()
        made, objects = exact.networks(), self.copies[0]
        for i in range(1, self.size):
            memo: dict[int, Any] = {}
            self.copies.append(copy.deepcopy(objects, memo))
            copied = memo.get(id(memo), [])  # copy.deepcopy keeps all objects that it has copied alive here
            for optimizer in [each for each in copied if isinstance(each, torch.optim.Optimizer)]:
                self._share_memory(optimizer, memo[id(optimizer)], is_first=i == 1)
            if i == 1:
                self._watch_loads([each for each in copied if isinstance(each, nn.Module)])
            modules = [_copy_of(module, f"a {type(module).__name__}", memo) for module in made.modules[0]]
            made.copies.append([_copy_of(p, f"'{name}'", memo) for p, name in zip(made.parameters, made.names)])
            made.modules.append(modules)
            made.touched.append(set())
            made.watch(i)
        self._is_stale = False

    def close(self) -> None:
        """Undo the changes to the objects, and drop their copies. Local."""
        made = exact.networks()
        self._turns.close()
        self._changed.close()
        made.running_sum.clear()
        del self.copies[1:], made.copies[1:], made.modules[1:], made.touched[1:]
        self._is_stale = True

    def _share_memory(self, optimizer: torch.optim.Optimizer, twin: Any, is_first: bool) -> None:
        known = set(map(id, exact.networks().parameters))
        for group, of_twin in zip(optimizer.param_groups, twin.param_groups):
            for parameter, its in zip(group["params"], of_twin["params"]):
                if id(parameter) not in known and parameter.requires_grad:
                    raise SyncError(
                        f"a {type(optimizer).__name__} among the objects of a step trains a parameter of shape "
                        f"{tuple(parameter.shape)} that is in no wrapped network: each virtual rank would train its "
                        "own copy. Call wrap_parallel on its network first."
                    )
                its.data = parameter.data
                its.grad = None if parameter.grad is None else parameter.grad.clone()
        twin.state = collections.defaultdict(dict)
        step_of_all = optimizer.step if is_first else optimizer.step.__wrapped__  # type: ignore[attr-defined]

        @functools.wraps(step_of_all)
        def step(closure: Any = None) -> Any:
            playing = current().turns
            if playing is None or playing.now is None:
                return step_of_all(closure)
            if closure is not None:
                raise SyncError(
                    f"{type(optimizer).__name__}.step with a closure, in a step of virtual ranks: the closure makes "
                    "backward passes within the optimizer step. Use an optimizer without a closure."
                )
            result = playing.meet("a step of an optimizer", None, lambda _: step_of_all())
            # A schedule reads a flag or number of its optimizer to see whether it has stepped.
            vars(twin).update((name, flag) for name, flag in vars(optimizer).items() if isinstance(flag, int))
            return result

        if is_first:
            self._changed.enter_context(replaced(optimizer, "step", step))
        twin.step = step

    def _watch_loads(self, modules: Sequence[nn.Module]) -> None:
        def note(*_: Any) -> None:
            self._is_stale |= self._turns.now is None  # within a step each virtual rank loads into its own copy

        for module in modules:
            self._changed.callback(module.register_load_state_dict_post_hook(note).remove)

    def _begin_turn(self, i: int) -> None:
        shares.play(self._parts[i])
        exact.networks().running_sum.begin_turn(i)

    def _batch_at_hand(self) -> shares.Share:
        at_hand = shares.at_hand()
        if at_hand is None:
            raise DataError(
                "a step of virtual ranks without a current batch of make_loader: it is unknown which samples "
                "belong to which virtual rank. Call it with the batch that make_loader's loader has just given."
            )
        odd = next((num_rows for num_rows in at_hand.sizes if num_rows % self.size), None)
        if odd is not None:
            raise DataError(
                f"{odd} samples on this process do not divide over its {self.size} virtual ranks, which would be "
                "weighted differently. Use a global batch that the option exact divides, with drop_last."
            )
        return at_hand


def _copy_of(wrapped: Any, name: str, memo: Mapping[int, Any]) -> Any:
    if id(wrapped) not in memo:
        raise SyncError(
            f"{name} was given to wrap_parallel but is not among the objects of the step: virtual ranks would "
            "overwrite each other's training. Give ddpshim.virtual_step all wrapped networks."
        )
    return memo[id(wrapped)]


def _has_rows(item: Any) -> bool:
    return (hasattr(item, "shape") and len(item.shape) > 0) or isinstance(item, Mapping)
