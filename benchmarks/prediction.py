"""Tests `python -m ddpshim predict`: compares predictions from a run on two ranks with runs on four and eight.

    python -m benchmarks --only prediction

Computation, the network between ranks and the cores of data workers are emulated by sleeps, so that eight ranks run on
two cores. The ranks, their loaders and workers, and all measuring code are real.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ddpshim
from benchmarks.emulated import SleepingPolicy
from benchmarks.results import Result, main
from ddpshim.job import machine
from ddpshim.job.pace import FIRST_LOOK, NUM_WARM_UP
from ddpshim.job.replaced import replaced
from ddpshim.observe.predict import measured, predict
from ddpshim.observe.ring_model import Cluster, Link
from tests.ranks import run_ranks

MEASURED, TRUTHS = 2, (4, 8)
COMPUTE_S, OPTIMIZER_S = 1.6, 0.01  # of the global batch
NUM_PARAMETERS, NUM_LAYERS = 100_000, 4  # few, since gradients occupy cores, which sleeps do not
GLOBAL_BATCH, NUM_CORES = 16, 4
FAST = Link(1e12, 0.0)


class Case(NamedTuple):
    """An emulated machine: the link of a ring, workers per rank, and seconds to read the global batch."""

    name: str
    link: Link = FAST
    num_workers: int = 0
    read_s: float = 0.0


CASES = (
    Case("computation alone"),
    Case("slow links", Link(4e6, 1e-3)),
    Case("links with latency", Link(1e9, 1e-3)),
    Case("a loader without workers", read_s=0.8),
    Case("workers on four cores", num_workers=2, read_s=1.2),
)


class _Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample occupies an emulated core for `seconds`."""

    def __init__(self, cores: Any, seconds: float) -> None:
        self.cores, self.seconds = cores, seconds

    def __len__(self) -> int:
        return 100 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.cores:
            time.sleep(self.seconds)
        return torch.ones(())


class _Network:
    """Delays messages until a ring with that link would have delivered them, one after the other."""

    def __init__(self, link: Link) -> None:
        self._cluster = Cluster("emulated", link, link, gpus_per_node=64)
        self._free_at, self._lock = 0.0, threading.Lock()

    def deliver(self, message: torch.Tensor) -> None:
        with self._lock:
            needs_s = self._cluster.all_reduce_s(4 * message.numel(), dist.get_world_size())
            self._free_at = max(self._free_at, time.perf_counter()) + needs_s
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Delay messages that Python sends like those of the hook."""
        original = dist.all_reduce

        def all_reduce(message: torch.Tensor) -> None:
            original(message)
            self.deliver(message)

        with replaced(dist, "all_reduce", all_reduce):
            yield


def _hook(network, bucket):  # type: ignore[no-untyped-def]  # torch accepts only its own annotations
    def arrive(future: Any) -> torch.Tensor:
        network.deliver(bucket.buffer())
        return future.value()[0] / dist.get_world_size()  # type: ignore[no-any-return]

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(arrive)  # type: ignore[union-attr]


class _SGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(OPTIMIZER_S)
        super().step(closure)


def _train(case: Case, cores: Any, folder: str, num_steps: int) -> list[float]:
    """Return the seconds of each step on this rank (collective)."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a rank may have workers
    here, network = ddpshim.world(), _Network(case.link)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(machine, "num_cores", lambda: NUM_CORES))
        with network.in_place():
            stack.enter_context(ddpshim.record(folder))
        net = SleepingPolicy(NUM_PARAMETERS, NUM_LAYERS, COMPUTE_S / here.world_size)
        bucket_mb = 4 * NUM_PARAMETERS / NUM_LAYERS / 2**20
        policy = ddpshim.wrap_parallel(net, bucket_cap_mb=bucket_mb, comm_hook=_hook, comm_hook_state=network)
        optimizer = _SGD(policy.parameters(), lr=0.0)
        samples = _Samples(cores, case.read_s / GLOBAL_BATCH)
        loader = ddpshim.make_loader(samples, batch_size=GLOBAL_BATCH, num_workers=case.num_workers)
        times = [time.perf_counter()]
        for batch in loader:
            optimizer.zero_grad()
            policy(batch[:1]).backward()
            optimizer.step()
            times.append(time.perf_counter())
            if len(times) > num_steps:
                break
    return [after - before for before, after in zip(times, times[1:])]


def errors(case: Case) -> Iterator[tuple[int, float, float, str]]:
    """Yield, for each number of ranks, predicted and true seconds of a step, and the predicted limit."""
    cores = multiprocessing.get_context("forkserver").Semaphore(NUM_CORES)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_train, MEASURED, case, cores, folder, FIRST_LOOK + 2, timeout_s=300)
        run = measured(folder)
        for world_size in TRUTHS:
            with tempfile.TemporaryDirectory() as other:
                times = run_ranks(_train, world_size, case, cores, other, 12 + NUM_WARM_UP, timeout_s=300)[0]
            found = predict(run, world_size)
            yield world_size, found.step_s, statistics.median(times[NUM_WARM_UP:]), found.limit


def run(quick: bool) -> list[Result]:
    """Return the relative error of the prediction for each case and number of ranks."""
    results = []
    for case in CASES[1:2] if quick else CASES:
        for world_size, predicted_s, true_s, limit in errors(case):
            note = f"predicted {1e3 * predicted_s:.0f} ms, true {1e3 * true_s:.0f} ms; the limit: {limit}"
            what = f"error of the prediction for {world_size} ranks, {case.name}"
            error = abs(predicted_s / true_s - 1)
            results.append(Result("prediction", what, 100 * error, "%", at_most=15.0, note=note))
    return results


if __name__ == "__main__":
    main(run, __doc__)
