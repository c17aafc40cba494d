"""Compares what DTensor, with the batch as Shard(0), computes on two ranks with what one process computes.

    python -m benchmarks.dtensor [--quick]

Each expression of benchmarks/dtensor.txt, in float64, forward and backward, on 8 and on 7 rows (`--quick`: 8), with
DTensors and with ddpshim's row tensors. It prints what becomes of each. For DTensor, plain tensors count as replicated
(`implicit_replication`). benchmarks/dtensor_time.py measures the time.
"""

from __future__ import annotations

import contextlib
import copy  # noqa: F401 (an expression uses it)
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: F401 (expressions use it)
import torch.utils.checkpoint
from torch import nn

import ddpshim
from benchmarks.results import Result, main
from ddpshim.process.job import current
from ddpshim.rows import blocks, calls
from ddpshim.rows.tensor import Rows, whole
from tests.ranks import run_ranks

try:
    import torch.distributed.tensor as dtensor
    from torch.distributed.tensor.experimental import implicit_replication
except ImportError:  # torch below 2.5
    import torch.distributed._tensor as dtensor  # type: ignore[no-redef]

    implicit_replication = contextlib.nullcontext  # torch 2.1 has none
    with contextlib.suppress(ImportError):
        from torch.distributed._tensor.experimental import implicit_replication  # type: ignore[no-redef]

EXPRESSIONS = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()


class Arm:
    """How a rank holds a batch: "one process", "DDP" (its rows, in a plain tensor), "DTensor..." or "row tensors"."""

    def __init__(self, name: str) -> None:
        warnings.simplefilter("ignore")  # DTensor warns of every draw on a CPU
        self.name, self.size, self.is_dtensor = name, dist.get_world_size(), name.startswith("DTensor")
        self.is_rows, self.context = name == "row tensors", contextlib.nullcontext
        if self.is_dtensor:
            self.mesh, self.context = dtensor.DeviceMesh("cpu", list(range(self.size))), implicit_replication
        if self.is_rows:
            self.context, current().holds_whole_batches = calls.installed, True  # as `run` does

    def cut(self, x: torch.Tensor, needs_grad: bool = False) -> Any:
        """Return the batch `x` as this arm holds it."""
        if self.is_rows:
            part = blocks.part_of(len(x))
            return Rows(blocks.own(x, 0, part).clone(), 0, part).requires_grad_(needs_grad)  # as a loader makes them
        if self.is_dtensor and len(x) % self.size:
            x = dtensor.distribute_tensor(x, self.mesh, [dtensor.Shard(0)])
        elif self.name != "one process":
            x = x.chunk(self.size)[dist.get_rank()].clone()
            if self.is_dtensor:
                x = dtensor.DTensor.from_local(x, self.mesh, [dtensor.Shard(0)], run_check=False)
        return x.detach().requires_grad_(needs_grad)

    def own(self, net: nn.Module) -> nn.Module:
        """Return `net` with parameters that this arm can use."""
        if self.is_rows:
            return ddpshim.wrap_parallel(net)
        return dtensor.distribute_module(net, self.mesh) if self.is_dtensor else net

    def whole(self, x: Any) -> Any:
        """Return what one process would have (collective)."""
        if isinstance(x, dtensor.DTensor):
            return x.redistribute(placements=[dtensor.Replicate()]).to_local()
        return whole(x) if isinstance(x, Rows) else x


def _values(expression: str, num_rows: int, arm: Arm) -> list[Any]:
    """Return the value of an expression, and the gradients of the sum of its squares."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    (x, w), t = torch.randn(2, num_rows, 6), torch.randint(0, 5, (num_rows,))
    x, w, t, m = arm.cut(x, True), arm.cut(w, True), arm.cut(t), arm.cut(torch.arange(num_rows) % 4 != 1)
    parameters: list[Any] = []

    def own(net: nn.Module) -> nn.Module:
        parameters.extend((net := arm.own(net)).parameters())
        return net

    names = {**globals(), "x": x, "w": w, "t": t, "m": m, "own": own}
    *statements, value = expression.split("; ")
    exec("; ".join(statements), names)
    y, gradients = eval(value, names), ()
    if isinstance(y, torch.Tensor) and y.requires_grad:
        gradients = torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True)
    return [arm.whole(one) for one in (y, *gradients)]


def _are_equal(a: Any, b: Any) -> bool:
    a, b = (torch.as_tensor([] if one is None else one).double() for one in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9)


def outcomes(name: str, num_rows: int) -> dict[str, str]:
    """Return what each expression becomes: "equal", "error: ...", "other value" or "other gradient" (collective)."""
    alone = Arm("one process")
    expected = {line: _values(line, num_rows, alone) for line in EXPRESSIONS if line and line[0] != "#"}
    arm, found = Arm(name), {}
    for line, values in expected.items():
        try:
            with arm.context():
                got = _values(line, num_rows, arm)
            equal = [_are_equal(a, b) for a, b in itertools.zip_longest(values, got[: len(values)])]
            found[line] = "equal" if all(equal) else "other gradient" if equal[0] else "other value"
        except Exception as error:
            found[line] = "error: " + (str(error) or type(error).__name__).splitlines()[0]
    return found


def num_operators() -> int:
    """Return the number of operators for which DTensor has a rule."""
    propagator: Any = getattr(dtensor.DTensor, "_propagator", None)  # in torch 2.1
    propagator = propagator or dtensor.DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    return len({operator for name in tables for operator in getattr(propagator, name, ())})


def run(quick: bool, prints: bool = False) -> Iterator[Result]:
    """Yield, by kind of tensor and number of rows, how many expressions become what one process computes."""
    yield Result("dtensor", "operators for which DTensor has a rule", num_operators(), "")
    for arm in ("DTensor", "row tensors"):
        for num_rows in (8,) if quick else (8, 7):
            by_rank = run_ranks(outcomes, 2, arm, num_rows, timeout_s=900)
            found = {line: max(each[line] for each in by_rank) for line in by_rank[0]}  # "equal" < "error" < "other"
            if prints:
                print(f"\n{arm}, {num_rows} rows", *(f"{one[:90]:90}  {line}" for line, one in found.items()), sep="\n")
            num = Counter(one[:5] for one in found.values())
            note = f"of {len(found)}; {num['error']} are errors, {num['other']} are silently something else"
            what = f"expressions as in one process, {arm}, {num_rows} rows"
            yield Result("dtensor", what, num["equal"], "", note=note)


if __name__ == "__main__":
    main(functools.partial(run, prints=True), __doc__)
