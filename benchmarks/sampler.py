"""Measures orders of samples: ddpshim's and torch's DistributedSampler; weighted draws also beside robomimic's.

    python -m benchmarks.sampler [--quick]

Times are CPU times of one rank of eight, for a whole pass over its share; memory is the growth of a fresh process.
"""

from __future__ import annotations

import collections
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import torch
from torch.utils.data import DistributedSampler, Sampler, WeightedRandomSampler

from benchmarks.results import Result, alternate, main, median_and_quartiles, ratio
from ddpshim.data.sampler import ShardedSampler, ShuffledOrder
from ddpshim.data.split import Split
from ddpshim.data.weighted import WeightedOrder

NAME = "sampler"
WORLD_SIZE, RANK, BATCH_SIZE_PER_RANK = 8, 3, 256
DEADLINE_S = 600.0


def _split(rank: int = RANK, world_size: int = WORLD_SIZE) -> Split:
    return Split(BATCH_SIZE_PER_RANK * world_size, rank, world_size, drop_last=True)


def _ours(size: int, world_size: int = WORLD_SIZE) -> ShardedSampler:
    sampler = ShardedSampler(ShuffledOrder(size, seed=0), _split(RANK % world_size, world_size))
    sampler.begin(1)
    return sampler


def _torchs(size: int, world_size: int = WORLD_SIZE) -> Sampler[Any]:
    sampler = DistributedSampler(range(size), world_size, RANK % world_size, drop_last=True)  # type: ignore[arg-type,var-annotated]
    sampler.set_epoch(1)
    return sampler


def _weights(size: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _our_draws(weights: torch.Tensor) -> ShardedSampler:
    sampler = ShardedSampler(WeightedOrder(WeightedRandomSampler(weights, len(weights)), seed=0), _split())  # type: ignore[arg-type]
    sampler.begin(1)
    return sampler


class _Robomimics(WeightedRandomSampler):
    """Draws as robomimic 0.5's CustomWeightedRandomSampler does."""

    def __iter__(self) -> Iterator[int]:
        import numpy as np

        share = self.weights.numpy() / torch.sum(self.weights).numpy()
        drawn = np.random.choice(range(len(self.weights)), size=self.num_samples, p=share, replace=self.replacement)
        return iter(torch.from_numpy(drawn).tolist())


def _share(sampler: Any) -> Iterator[int]:
    """Return a rank's share of a draw of all samples, as a typical trainer splits it."""
    return iter(list(sampler)[RANK::WORLD_SIZE])


def _cpu_s(make: Callable[[], Any]) -> Callable[[], float]:
    def measure() -> float:
        started = time.process_time()
        collections.deque(make(), maxlen=0)
        return time.process_time() - started

    return measure


def _memory_mb() -> float:
    """Return the peak memory of this process since the peak was last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _run(kind: str, size: int, out: Any) -> None:
    torch.set_num_threads(1)
    weights = _weights(size) if "weighted" in kind else torch.empty(0)
    makers: dict[str, Callable[[], Any]] = {
        "ours": lambda: _ours(size),
        "torch": lambda: _torchs(size),
        "weighted ours": lambda: _our_draws(weights),
        "weighted torch": lambda: _share(WeightedRandomSampler(weights, size)),  # type: ignore[arg-type]
        "weighted robomimic": lambda: _share(_Robomimics(weights, size)),  # type: ignore[arg-type]
    }
    small = {"ours": lambda: _ours(10**5), "weighted ours": lambda: _our_draws(_weights(10**5))}
    collections.deque(small.get(kind, lambda: _torchs(1000))(), maxlen=0)  # modules loaded on first use must not count
    Path("/proc/self/clear_refs").write_text("5")
    before, cpu, started = _memory_mb(), time.process_time(), time.perf_counter()
    indices = iter(makers[kind]())
    next(indices)
    first_s = time.perf_counter() - started
    for _ in range(min(size // WORLD_SIZE // 2, 10**6)):
        next(indices)
    out.put((first_s, time.process_time() - cpu, _memory_mb() - before))


def fresh(kind: str, size: int) -> tuple[float, float, float]:
    """Return seconds to the first index, CPU seconds to the end, and MB, from a new process."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=_run, args=(kind, size, out))
    process.start()
    try:
        found: tuple[float, float, float] = out.get(timeout=DEADLINE_S)
    finally:
        process.join(5)
        process.kill()
    return found


def _firsts_ms(size: int, num_times: int, start_step: int = 0) -> list[float]:
    """Return milliseconds from the beginning of a pass to its first index, several times."""
    found = []
    sampler = _ours(size)
    for epoch in range(num_times):
        sampler.epochs.set(epoch, start_step)
        started = time.perf_counter()
        sampler.begin(epoch)
        next(iter(sampler))
        found.append((time.perf_counter() - started) * 1000)
    return found


def run(quick: bool) -> Iterator[Result]:
    """Yield all results."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _shuffles(quick)
        yield from _weighted(quick)
        if not quick:
            yield from _torchs_largest()
    finally:
        torch.set_num_threads(num_threads)


def _shuffles(quick: bool) -> Iterator[Result]:
    for size in (10**6,) if quick else (10**6, 10**7):
        arms = {"ours": _cpu_s(lambda: _ours(size)), "torch": _cpu_s(lambda: _torchs(size))}  # noqa: B023
        cpu = alternate(arms, 7 if size == 10**6 else 5)
        what = f"CPU time of an index, {size:.0e} samples, rank of {WORLD_SIZE}"
        note = f"{median_and_quartiles(cpu['ours'])[0] / (size // WORLD_SIZE) * 1e9:.0f} ns"
        yield Result(NAME, what, *_ratio(cpu, "torch"), at_most=0.1, note=note)
    alone = {"ours": _cpu_s(lambda: _ours(10**6, 1)), "torch": _cpu_s(lambda: _torchs(10**6, 1))}
    note = "making and counting Python's ints is most of either"
    yield Result(
        NAME, "CPU time of an index, 1e+06 samples, one rank", *_ratio(alternate(alone, 5), "torch"), note=note
    )
    for size in (10**4, 10**6, 10**8, 10**12):
        milliseconds, quartiles = median_and_quartiles(_firsts_ms(size, 50))
        yield Result(NAME, f"first index, {size:.0e} samples", milliseconds, "ms", quartiles, at_most=2.0)
    milliseconds, quartiles = median_and_quartiles(_firsts_ms(10**8, 50, start_step=40_000))
    yield Result(NAME, "first index at step 40,000, 1e+08 samples", milliseconds, "ms", quartiles, at_most=2.0)
    _, _, memory = fresh("ours", 10**8)
    yield Result(NAME, "memory of a pass, 1e+08 samples", memory, "MB", at_most=10.0)


def _weighted(quick: bool) -> Iterator[Result]:
    size = 10**6 if quick else 10**7
    weights = _weights(size)
    peers = {"torch": WeightedRandomSampler, "robomimic": _Robomimics}
    arms = {"ours": _cpu_s(lambda: _our_draws(weights))}
    for name, peer in peers.items():
        arms[name] = _cpu_s(lambda peer=peer: _share(peer(weights, size)))  # type: ignore[misc]
    cpu = alternate(arms, 5 if quick else 3)
    for name in peers:
        what = f"CPU time of a weighted draw, {size:.0e} weights, rank of {WORLD_SIZE}, over {name}"
        yield Result(
            NAME, what, *_ratio(cpu, name), at_most=0.1, note=f"{median_and_quartiles(cpu['ours'])[0]:.2f} s a pass"
        )
    memory = {kind: fresh(f"weighted {kind}", size)[2] for kind in ("ours", *peers)}
    for name in peers:
        what = f"memory of weighted draws, {size:.0e} weights, over {name}"
        yield Result(
            NAME, what, memory["ours"] / memory[name], f"x {name}", at_most=0.1, note=f"{memory['ours']:.0f} MB"
        )
    more = 2**24 + 1 if quick else 10**8
    first_s, _, megabytes = fresh("weighted ours", more)
    note = f"{megabytes:.0f} MB beside the weights; torch refuses"
    yield Result(NAME, f"first of the weighted draws, {more:.0e} weights", first_s, "s", note=note)


def _torchs_largest() -> Iterator[Result]:
    first_s, _, memory = fresh("torch", 10**8)
    yield Result(NAME, "first index, 1e+08 samples, torch", first_s, "s", note="once")
    yield Result(NAME, "memory of a pass, 1e+08 samples, torch", memory, "MB", note="once")


def _ratio(cpu: dict[str, list[float]], base: str) -> tuple[float, str, tuple[float, float]]:
    value, quartiles = ratio(cpu["ours"], cpu[base])
    return value, f"x {base}", quartiles


if __name__ == "__main__":
    main(run, __doc__)
