"""Measures how long a checkpoint stops the training: written in the background or at once, in alternation.

python -m evidence.checkpoint [--quick]
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch
from torch import nn

from ddpshim.checkpoint import files as checkpoint
from ddpshim.process.machine import num_cores
from evidence.results import Result, alternate, main, median_and_quartiles, ratio

_WIDTH = 1000  # a layer of 1M parameters, as the larger ones of a policy


def run(quick: bool) -> list[Result]:
    """Measure the stall, and the time until the file exists, for a network with the state of its AdamW."""
    num_million, num_rounds = (10, 5) if quick else (100, 5)
    state = _state(num_million)
    size = f"{num_million}M parameters with AdamW"
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DISK")) as folder:
        path = os.path.join(folder, "last.pth")
        durable_s: list[float] = []

        def at_once() -> float:
            start = time.perf_counter()
            checkpoint.save(state, path)
            return time.perf_counter() - start

        def in_background() -> float:
            start = time.perf_counter()
            checkpoint.save_in_background(state, path)
            stall_s = time.perf_counter() - start
            checkpoint.flush()
            durable_s.append(time.perf_counter() - start)
            return stall_s

        at_once()  # the first write to a disk takes another time
        first_s = in_background()
        durable_s.clear()
        found = alternate({"at once": at_once, "in background": in_background}, num_rounds)
    stall, quartiles = ratio(found["in background"], found["at once"])
    sync_s, sync_quartiles = median_and_quartiles(found["at once"])
    late, late_quartiles = ratio(durable_s, found["at once"])

    busy = f"{os.getloadavg()[0]:.0f} processes wanted the {num_cores()} cores: a copy waits for one, a disk does not"

    def result(what: str, value: float, unit: str, **more: Any) -> Result:
        return Result("checkpoint", f"{what}, {size}", value, unit, **more)

    return [
        result("training stands still", stall, "x saving at once", quartiles=quartiles, at_most=0.15, note=busy),
        result("saving at once", sync_s, "s", quartiles=sync_quartiles),
        result("until the file is there", late, "x saving at once", quartiles=late_quartiles),
        result(
            "training stands still for the first one",
            first_s / sync_s,
            "x saving at once",
            note="memory for the copy is allocated",
        ),
    ]


def _state(num_million: int) -> dict[str, Any]:
    net = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(num_million)])
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}


if __name__ == "__main__":
    main(run, __doc__)
