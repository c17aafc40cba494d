"""Measures the cost of recording a run for the report: a step on two ranks, with and without, in alternation.

    python -m benchmarks.record_cost

On a busy machine the ratio of the two steps is mostly noise. The CPU time of the recording's own code is reliable: in
each step, and at the end of an epoch.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import ddpshim
from benchmarks.guard_cost import D_IN, D_OUT, _policy
from benchmarks.results import Result, main, ratio
from ddpshim.observe.recording import Recorder
from tests.ranks import run_ranks


def _measure(folder: str, num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Return the milliseconds of a step in each round, with recording and without."""
    policy = ddpshim.wrap_parallel(_policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-5)
    data = torch.utils.data.TensorDataset(torch.randn(128 * num_steps, D_IN), torch.randn(128 * num_steps, D_OUT))
    loader = ddpshim.make_loader(data, batch_size=128)

    def epoch(is_recorded: bool) -> float:
        ddpshim.world().barrier()
        start = time.perf_counter()
        if is_recorded:
            recorder.start_counting()
        for x, y in loader:
            optimizer.zero_grad()
            loss = (policy(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            value = loss.item()
        if is_recorded:
            recorder.stop_counting()
            recorder.write_epoch(1, "training", {"Loss": value})
        return 1000 * (time.perf_counter() - start) / num_steps

    epoch(False)
    without = [epoch(False) for _ in range(num_rounds)]  # first: once times are counted, they are until the job ends
    recorder = Recorder(folder)
    epoch(True)
    return {"with": [epoch(True) for _ in range(num_rounds)], "without": without}


class _Empty(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> int:
        return index


def _own_us(num_rounds: int) -> tuple[float, float]:
    """Return the CPU microseconds that recording adds to an empty step, and those of the end of an epoch."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    loader = DataLoader(_Empty(), batch_size=None)

    def epoch() -> float:
        start = time.process_time()
        for _ in loader:
            optimizer.step()
        return time.process_time() - start

    without = [epoch() for _ in range(num_rounds)]
    with tempfile.TemporaryDirectory() as folder, ddpshim.record(folder) as run:
        added = statistics.median(epoch() for _ in range(num_rounds)) - statistics.median(without)
        start = time.process_time()
        for number in range(200):
            run.write_epoch(number, "training", {"Loss": 0.5, "lr": 0.1})
        ended = (time.process_time() - start) / 200
    return 1e6 * added / 2000, 1e6 * ended


def run(quick: bool) -> list[Result]:
    """Return the ratio of steps with recording to steps without, and the time in the recording's own code."""
    with tempfile.TemporaryDirectory() as folder:
        got = run_ranks(_measure, 2, folder, 6 if quick else 40, 10, timeout_s=600)[0]
        assert len(list(Path(folder).glob("ddpshim/rank_*.jsonl"))) == 2
    value, quartiles = ratio(got["with"], got["without"])
    step_ms = statistics.median(got["without"])
    step_us, epoch_us = _own_us(4 if quick else 20)
    return [
        Result(
            "record_cost", "step that is recorded, 2 ranks", value, "x without", quartiles, note=f"{step_ms:.1f} ms"
        ),
        Result("record_cost", "recording's own code in a step", step_us, "us of CPU", at_most=50.0),
        Result("record_cost", "recording's own code at the end of an epoch", epoch_us, "us of CPU", at_most=5000.0),
    ]


if __name__ == "__main__":
    main(run, __doc__)
