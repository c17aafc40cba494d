"""ddpshim on two simulated GPUs: what is called there, in which order, and who waits (tests/simulated_gpus)."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable

import pytest
import torch
from torch.utils._device import DeviceContext

from tests import simulated_gpus, test_parallel
from tests.ranks import run_ranks

_REASON = simulated_gpus.why_not()
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(_REASON is not None, reason=f"no simulated GPUs: {_REASON}")]


class _MadeOnGPU(DeviceContext):
    """What tests make without saying where is made on the GPU; what ddpshim makes stays where it says."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame and not ("/tests/" in frame.f_code.co_filename or "/ddpshim/" in frame.f_code.co_filename):
            frame = frame.f_back
        if frame and "/tests/" in frame.f_code.co_filename:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _on_gpu(fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn` of tests/test_parallel.py returns where all that it makes is made on this rank's GPU."""
    warnings.filterwarnings("ignore", "CUDA reports that you have")  # fork_rng, of the other GPU's generator
    batches = test_parallel._batches
    test_parallel._batches = lambda steps: [tuple(t.cuda() for t in pair) for pair in _on_cpu(batches, steps)]  # type: ignore
    with _MadeOnGPU(torch.device("cuda")):
        return fn(*args)


def _on_cpu(fn: Callable[..., Any], *args: Any) -> Any:
    with torch.device("cpu"):
        return fn(*args)


def _run_on_gpus(fn: Callable[..., Any], num_ranks: int, *args: Any, **options: Any) -> list[Any]:
    return run_ranks(_on_gpu, num_ranks, fn, *args, **options, on_gpus=True)


@pytest.mark.parametrize("name", [n for n in vars(test_parallel) if n.startswith("test_")])
def test_parallel_tests_hold_on_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_parallel, "run_ranks", _run_on_gpus)
    test = getattr(test_parallel, name)
    marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
    import inspect

    if marks:
        params = inspect.signature(test).parameters
        names = (
            marks[0].args[0]
            if isinstance(marks[0].args[0], (list, tuple))
            else [x.strip() for x in marks[0].args[0].split(",")]
        )
        v = marks[0].args[1][0]
        kw = dict(zip(names, v if len(names) > 1 else [v]))
        if set(kw) != set(params):
            pytest.skip(str(params))
        test(**kw)
    else:
        if inspect.signature(test).parameters:
            pytest.skip("fixtures")
        test()
