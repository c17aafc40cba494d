"""Adds up and averages numbers of ranks: once, or in statistics that ranks merge every n steps of a training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Optional

import torch

from ddpshim.errors import WorldError

if TYPE_CHECKING:
    from ddpshim.job.world import World


def on_cpu(value: Any) -> Any:
    """Return `value` with its tensors, including those in a mapping, on the CPU and detached. Local."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: on_cpu(item) for key, item in value.items()}
    return value


def reduce(values: list[Any], mean: bool, like: Any) -> Any:
    """Return the sum or mean of one value of each rank, with the type of `like`. Local."""
    first = values[0]
    if any(isinstance(value, Mapping) for value in values):
        keys = [set(value) if isinstance(value, Mapping) else {type(value)} for value in values]
        for rank, other in enumerate(keys):
            if other != keys[0] or not isinstance(values[rank], Mapping):
                raise WorldError(
                    f"ranks reduce mappings with different keys (rank 0 and rank {rank} differ in "
                    f"{sorted(map(str, other ^ keys[0]))}); numbers of different things would be averaged. Log the "
                    "same keys on every rank."
                )
        return {key: reduce([value[key] for value in values], mean, like[key]) for key in like}
    if isinstance(first, torch.Tensor):
        if any(not isinstance(v, torch.Tensor) or v.shape != first.shape for v in values):
            raise WorldError(
                f"ranks reduce tensors of different shapes ({[tuple(getattr(v, 'shape', ())) for v in values]}); "
                "broadcasting would give wrong numbers. Reduce tensors of equal shapes."
            )
        if not any(v.is_complex() for v in values):
            is_float = any(v.is_floating_point() for v in values)
            total = torch.stack([v.to(torch.float64 if is_float else torch.int64) for v in values]).sum(0)
            if mean:
                total = total.double() / len(values)
            return total.to(like.device, like.dtype if like.is_floating_point() else total.dtype)
    if all(isinstance(v, Real) for v in values):
        add: Any = math.fsum
        if all(isinstance(v, Integral) for v in values):
            values, add = [*map(int, values)], sum
        elif not all(map(math.isfinite, values)):  # show a loss that exploded, and do not end the job
            add = sum
        return add(values) / len(values) if mean else add(values)
    raise WorldError(
        f"cannot add values of type {sorted({type(v).__name__ for v in values})} over ranks; the result would be "
        "meaningless. Pass numbers, tensors or mappings of these, or use gather()."
    )


class Running:
    """Means, deviations, counts and rates of success over all ranks. From `World.running`.

    A rank's entries stay local until `merge`, or every `every_n_steps`-th `step`: then each rank contributes its new
    entries, so that nothing counts twice. `mean` and `results` return the merged part, equal on all ranks. All entries
    weigh the same, however many each rank has.

    As one of `Resumable`'s objects it is saved and loaded, including entries that are not merged yet.

    >>> import ddpshim
    >>> running = ddpshim.World().running(every_n_steps=2)
    >>> running.add("return", [1.0, 3.0])
    >>> running.step()
    >>> running.add("return", 5.0)
    >>> running.step()["means"]
    {'return': 3.0}
    """

    def __init__(self, here: World, every_n_steps: int) -> None:
        if every_n_steps < 1:
            raise WorldError(f"every_n_steps={every_n_steps}: statistics would never be merged. Use 1 or more.")
        self.every_n_steps = every_n_steps
        self._world, self._num_steps = here, 0
        self._merged, self._new = _empty(), _empty()

    def add(self, name: str, values: Any) -> None:
        """Add a number, or entries along the first dimension of a tensor, an array or a list. Local.

        With more dimensions, (N, D), each of the D has its own mean and deviation, as for observations.
        """
        entries = torch.as_tensor(values).detach().double().cpu()
        entries = entries.reshape(1) if entries.dim() == 0 else entries
        if len(entries):
            mean = entries.mean(0)
            squares = ((entries - mean) ** 2).sum(0)
            _merge(self._new, {"moments": {name: (len(entries), mean, squares)}, "counts": {}})

    def count(self, name: str, by: int = 1) -> None:
        """Add `by` to a counter. Local."""
        self._new["counts"]["counts", name] += by

    def episode(self, task: Any, is_success: bool) -> None:
        """Add an episode of `task` (text or a number). Local."""
        self._new["counts"].update({("episodes", task): 1, ("successes", task): int(bool(is_success))})

    def step(self) -> Optional[dict[str, Any]]:
        """Count a step; every `every_n_steps`-th calls `merge` and returns its result (collective)."""
        self._num_steps += 1
        return None if self._num_steps % self.every_n_steps else self.merge()

    def merge(self) -> dict[str, Any]:
        """Merge the new entries of all ranks; returns the `results` of these entries alone (collective)."""
        together = _empty()
        for part in self._gather_new():
            _merge(together, part)
        _merge(self._merged, together)
        return _results(together)

    def num(self, name: str) -> int:
        """The number of merged entries of `name`. Local."""
        return int(self._merged["moments"].get(name, (0,))[0])

    def mean(self, name: str) -> Any:
        """The mean of all merged entries of `name`, a number or a tensor (D,). Local.

        Raises KeyError if there are none.
        """
        mean = self._merged["moments"][name][1]
        return mean.item() if mean.dim() == 0 else mean

    def results(self) -> dict[str, Any]:
        """All merged statistics, for a JSON file: means, deviations, counts, and success rates by task. Local."""
        return _results(self._merged)

    def collect(self) -> None:
        """Move all new entries to the main rank, whose state is saved; the next merge includes them (collective)."""
        parts = self._gather_new()
        for part in parts if self._world.is_main else ():
            _merge(self._new, part)

    def state_dict(self) -> dict[str, Any]:
        """Return the merged entries, and the new ones of this rank. Local; call `collect` first."""
        return {"num_steps": self._num_steps, "merged": self._merged, "new": self._new}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load `state`, the main rank's, on all ranks; only the main rank takes its new entries. Local."""
        self._num_steps, self._merged = state["num_steps"], state["merged"]
        self._new = state["new"] if self._world.is_main else _empty()

    def _gather_new(self) -> list[dict[str, Any]]:
        new, self._new = self._new, _empty()
        return self._world.gather(new)


def _empty() -> dict[str, Any]:
    """Return no entries: moments (number, mean, sum of squared deviations) by name, counts by kind and name."""
    return {"moments": {}, "counts": Counter()}


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Merge means and sums of squares as Chan, Golub and LeVeque (1983) do, without cancellation."""
    into["counts"].update(new["counts"])
    for name, (more, mean, squares) in new["moments"].items():
        before, old, old_squares = into["moments"].get(name, (0, torch.zeros_like(mean), torch.zeros_like(mean)))
        if old.shape != mean.shape:
            raise WorldError(
                f"{name!r} has entries of shape {tuple(old.shape)} and of {tuple(mean.shape)}: these "
                "cannot be averaged. Add entries of one shape, or use two names."
            )
        num, difference = before + more, mean - old
        spread = old_squares + squares + difference**2 * (before * more / num)
        into["moments"][name] = (num, old + difference * (more / num), spread)


def _results(of: Mapping[str, Any]) -> dict[str, Any]:
    moments, rates, counts = dict(sorted(of["moments"].items())), {}, of["counts"]
    for (kind, task), num in sorted(counts.items(), key=str):
        if kind == "episodes":
            won = counts["successes", task]
            rates[str(task)] = {"success_rate": won / num, "num_successes": won, "num_episodes": num}
    return {
        "means": {name: mean.tolist() for name, (_, mean, _) in moments.items()},
        "deviations": {name: (squares / num).sqrt().tolist() for name, (num, _, squares) in moments.items()},
        "num_entries": {name: num for name, (num, _, _) in moments.items()},
        "counts": {name: num for (kind, name), num in sorted(counts.items(), key=str) if kind == "counts"},
        "success_rates": rates,
    }
