"""Helps to test your trainer: runs a function on ranks, and asserts that ranks train as one process does."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist

from ddpshim.errors import LaunchError
from ddpshim.launch.spawning import spawn
from ddpshim.process.job import current
from ddpshim.process.launch_env import PLACE
from ddpshim.process.say import count, ranks_called

_MOST_SHOWN = 5
_LEAST_SCALE = 1e-2  # differences are relative to at least this value: a tensor near zero is only rounding errors


def on_ranks(
    function: Callable[[], Any], nproc: int = 2, *, deadline_s: Optional[float] = 60.0, gpus: bool = False
) -> list[Any]:
    """Return the results of `function()` on `nproc` ranks, in rank order; no process is left, even on errors. Local.

    Each rank is forked from this process, as by `ddpshim.spawn`: `function` may be a closure or a
    `functools.partial`, and calls `ddpshim.setup()`.

    Args:
        function: what each rank calls.
        nproc: number of ranks.
        deadline_s: after this many seconds, end all ranks and raise an error that says where each of them hangs.
        gpus: one GPU for each rank; else ranks compute on the CPU.

    Raises:
        RankError: a rank failed or was too slow. The message names the first one, with its traceback.
        LaunchError: ranks cannot be forked: this process has used a GPU, or is itself in a job.
    """

    def as_rank() -> Any:
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return function()

    return list(spawn(as_rank, nproc, every_rank=True, deadline_s=deadline_s))


def assert_same_training(
    train: Callable[[], Any],
    nproc: int = 2,
    *,
    tolerance: float = 1e-5,
    deadline_s: Optional[float] = 60.0,
    gpus: bool = False,
) -> None:
    """Assert that `train()` returns the same on each of `nproc` ranks as in one plain process. Local.

    Each run is forked from this process, whose random state and modules do not change. `train` calls
    `ddpshim.setup(batch="global")` and returns what must be the same on all ranks: a state_dict, a loss, or lists,
    mappings and dataclasses of such tensors, arrays and numbers. After `setup()` alone only a training without
    shuffling and random numbers is that of one process.

    Args:
        train: trains a few steps and returns the result, such as a state_dict.
        nproc: number of ranks.
        tolerance: the largest difference allowed, relative to the largest value of the tensor. Rounding alone causes
            1e-7 in float32, and more after many steps.
        deadline_s: time limit of each run, in seconds.
        gpus: train on GPUs, one for each rank; else on the CPU.

    Raises:
        AssertionError: a value differs. The message names it, the largest difference, and its position.
        RankError: `train` failed, was too slow, or did not call `ddpshim.setup()`: ranks would be equal anyway.
        LaunchError: ranks cannot be forked, as for `on_ranks`.
    """

    def alone() -> dict[str, Any]:
        for name in PLACE:
            os.environ.pop(name, None)
        return dict(_leaves(train(), "result"))

    def on_rank() -> tuple[dict[str, Any], bool]:
        result = train()
        here = current().world or current().left
        if (here is None or here.world_size != nproc) and not dist.is_initialized():
            raise LaunchError(
                f"train() did not call ddpshim.setup(): {nproc} ranks were {nproc} runs of one process, and equal "
                "whatever the trainer does. Call it as the first thing in train()."
            )
        return dict(_leaves(result, "result")), here is not None and here._job.door.batch == "local"

    importlib.import_module("torch._dynamo")  # DDP imports it, which takes seconds: once here, not in each process
    expected = on_ranks(alone, 1, deadline_s=deadline_s, gpus=gpus)[0]
    if not any(isinstance(value, (torch.Tensor, float)) for value in expected.values()):
        raise AssertionError(
            f"train() returned no tensor and no float ({', '.join(expected) or 'nothing'}); there is nothing to "
            "compare. Return the result of the training, such as a state_dict."
        )
    found, are_shares = zip(*on_ranks(on_rank, nproc, deadline_s=deadline_s, gpus=gpus))
    differing = {rank: lines for rank in range(nproc) if (lines := list(_compared(expected, found[rank], tolerance)))}
    if not differing:
        return
    rank, lines = next(iter(differing.items()))
    again = on_ranks(alone, 1, deadline_s=deadline_s, gpus=gpus)[0]
    if list(_compared(expected, again, tolerance)):
        why = "One process does not repeat itself either: give the trainer a seed, as ddpshim.setup(seed=1)."
    elif len({tuple(lines) for lines in differing.values()}) > 1 or len(differing) < nproc:
        why = "Ranks differ from each other: return what all ranks share, or see whether gradients cross the ranks."
    elif all(are_shares):
        why = (
            "All ranks agree. After setup() the order of samples and random numbers are others than in one process, by "
            'design: for its numbers call ddpshim.setup(batch="global"). If neither is drawn, `python -m ddpshim '
            "check` finds the first step at which a program parts, and why."
        )
    else:
        why = "All ranks agree. `python -m ddpshim check` finds the first step at which a program parts, and why."
    more = f"\n  ... and {len(lines) - _MOST_SHOWN} more" if len(lines) > _MOST_SHOWN else ""
    shown = "".join(f"\n  {line}" for line in lines[:_MOST_SHOWN])
    raise AssertionError(
        f"{ranks_called(list(differing))} of {nproc} did not train as one process does (tolerance {tolerance:g}): "
        f"{len(lines)} of {count(len(expected), 'value')} differ on rank {rank}.{shown}{more}\n{why}"
    )


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a nested `value`, with its path: ("result['net']['0.weight']", a tensor)."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif hasattr(value, "__array__"):  # numpy's
        yield name, torch.as_tensor(value, device="cpu")
    elif value is not None:
        yield name, value


def _compared(expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    """Yield a line for each value that differs."""
    for name in dict.fromkeys([*expected, *found]):
        if name not in found or name not in expected:
            yield f"{name}: only {'on the rank' if name in found else 'in one process'}"
        elif line := _difference(expected[name], found[name], tolerance):
            yield f"{name}: {line}"


def _difference(expected: Any, found: Any, tolerance: float) -> str:
    """Return how two values differ; an empty string if they do not."""
    if not all(isinstance(value, (torch.Tensor, float)) for value in (expected, found)):
        return "" if type(expected) is type(found) and expected == found else f"{expected!r} became {found!r}"
    one, other = (
        value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
        for value in (expected, found)
    )
    is_rounded = one.is_floating_point() or one.is_complex()
    finite = one[one.isfinite()].abs()
    allowed = tolerance * max(finite.max().item() if len(finite) else 0.0, _LEAST_SCALE) if is_rounded else 0.0
    try:
        torch.testing.assert_close(other, one, rtol=0.0, atol=allowed, check_device=False)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""
