"""Tests whether a shuffle is fair: statistics over many keys, beside those of torch.randperm.

    python -m tests.shuffle_quality --sizes 10000,1000000 --keys 100

It prints z-scores: those of a fair shuffle stay within about 4. Each statistic of one order is already a z-score;
`quality` tests whether their mean is 0 and their spread 1, since a shuffle can also be too regular. Orders longer than
`--whole` are read in 16 windows spread over them, and the expectations are those of such a sample.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Callable

import torch

from ddpshim.data.permutation import Permutation
from ddpshim.job.seeds import derive_seed

BINS, NUM_WINDOWS, BATCH_SIZE, NUM_FIRST = 16, 16, 256, 64
Order = Any  # gives an int64 tensor for a slice


def windows(size: int, num_read: int) -> list[range]:
    """Return evenly spread windows of an order with about `num_read` positions together, or all positions if fewer."""
    length = min(num_read, size) // NUM_WINDOWS
    starts = [number * size // NUM_WINDOWS for number in range(NUM_WINDOWS + 1)]
    return [range(a, b if num_read >= size else a + length) for a, b in zip(starts, starts[1:])]


def quality(make: Callable[[int], Order], size: int, num_keys: int, where: Sequence[range]) -> dict[str, float]:
    """Return the z-scores of the orders `make(0)`, `make(1)`, ..., which are successive epochs."""
    scores: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    firsts = torch.zeros(NUM_FIRST, BINS)
    order = make(num_keys)
    before = [_read(order, window) for window in where]
    for key in range(num_keys):
        order = make(key)
        now = [_read(order, window) for window in where]
        firsts[torch.arange(NUM_FIRST), order[:NUM_FIRST] * BINS // size] += 1
        for name, score in _scores(now, before, where, size).items():
            scores[name].append(score)
        for name, (found, expected) in _counts(now, where, size).items():
            counts[name][0] += found
            counts[name][1] += expected
        before = now
    found_z = {}
    for name, values in scores.items():
        found_z[f"{name}: mean"] = sum(values) / math.sqrt(num_keys)
        if num_keys > 3:
            found_z[f"{name}: spread"] = _normal(sum(value**2 for value in values), num_keys)
    for name, (found, expected) in counts.items():
        found_z[name] = (found - expected) / math.sqrt(expected)
    expected = num_keys / BINS
    found_z["first indices over keys"] = _normal(_chi_square(firsts, expected), NUM_FIRST * (BINS - 1))
    return found_z


def _scores(now: list[Any], before: list[Any], where: Sequence[range], size: int) -> dict[str, float]:
    """Return statistics of one order, read in windows, and the epoch before it: normal(0, 1) for fair shuffles."""
    mean, variance = (size - 1) / 2, (size**2 - 1) / 12
    out = {}
    # At the second lag a permutation network on bits would repeat itself, if it did.
    for lag in (1, 1 << (size - 1).bit_length() // 2):
        product, num_products, pairs = 0.0, 0, torch.zeros(BINS**2)
        for values in now:
            centred = values.double() - mean
            product += float(centred[lag:] @ centred[:-lag])
            num_products += len(values) - lag
            in_pairs = (values * BINS // size)[: len(values) // (2 * lag) * 2 * lag].view(-1, 2, lag)
            pairs += torch.bincount((in_pairs[:, 0] * BINS + in_pairs[:, 1]).flatten(), minlength=BINS**2)
        num_pairs = int(pairs.sum())
        out[f"serial correlation at {lag}"] = (product / variance + num_products / (size - 1)) / num_products**0.5
        # Drawing without replacement fills the bins more evenly.
        degrees = BINS**2 - 1 - (BINS - 1) * 2 * num_pairs / size
        out[f"pair chi-square at {lag}"] = _normal(_chi_square(pairs, num_pairs / BINS**2), degrees)
    there = torch.stack([torch.bincount(values * BINS // size, minlength=BINS) for values in now])
    expected = torch.tensor([[len(window) / BINS] for window in where])
    degrees = sum((BINS - 1) * (size - len(window)) / (size - 1) for window in where)
    out["position chi-square"] = _normal(_chi_square(there, expected), degrees)
    whole = [values[: len(values) // BATCH_SIZE * BATCH_SIZE].double().view(-1, BATCH_SIZE) for values in now]
    means = torch.cat(whole).mean(1) - mean
    degrees = len(means) * (size - BATCH_SIZE) / (size - 1)
    out["batch variance"] = _normal(float(means.square().sum()) / (variance / BATCH_SIZE), degrees)
    product = sum(float((one.double() - mean) @ (other.double() - mean)) for one, other in zip(now, before))
    out["correlation between epochs"] = product / variance / sum(map(len, now)) ** 0.5
    return out


def _counts(now: list[Any], where: Sequence[range], size: int) -> dict[str, tuple[int, float]]:
    """Return counts of rare events in one order, and their expectation in a fair one (Poisson)."""
    num_read = sum(map(len, now))
    fixed = sum(int((values == torch.arange(w.start, w.stop)).sum()) for values, w in zip(now, where))
    kept = sum(int(((values[1:] - values[:-1]).abs() == 1).sum()) for values in now)
    return {
        "fixed points": (fixed, num_read / size),
        "neighbours that stay neighbours": (kept, 2 * (num_read - len(now)) / size),
    }


def _chi_square(found: torch.Tensor, expected: Any) -> float:
    return float(((found - expected).double().square() / expected).sum())


def _normal(chi_square: float, degrees: float) -> float:
    """Wilson and Hilferty 1931: the cube root of a chi-square is nearly normal."""
    rest = 2 / (9 * degrees)
    return float(((chi_square / degrees) ** (1 / 3) - (1 - rest)) / rest**0.5)


def _read(order: Order, window: range) -> torch.Tensor:
    return torch.cat([order[a : min(a + 2**15, window.stop)] for a in range(window.start, window.stop, 2**15)])


def ours(size: int) -> Callable[[int], Order]:
    """Return a function that makes `ShuffledOrder`'s permutation of an epoch."""
    return lambda epoch: Permutation(size, derive_seed(0, "shuffle", epoch))


def randperm(size: int) -> Callable[[int], Order]:
    """Return a function that makes torch's permutation of an epoch, seeded like DistributedSampler's, but hashed."""
    return lambda epoch: torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(0, epoch)))


def main() -> None:
    """Print the z-scores of both shuffles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,1000000", help="numbers of samples")
    parser.add_argument("--keys", default="300,30", help="epochs, for each of the sizes")
    parser.add_argument("--randperm-keys", help="of randperm, if fewer: it is slow for large sizes")
    parser.add_argument("--whole", type=int, default=2 * 10**7, help="the largest number of positions that is read")
    options = parser.parse_args()
    texts = options.sizes, options.keys, options.randperm_keys or options.keys
    for size, num_keys, num_theirs in zip(*([int(part) for part in text.split(",")] for text in texts)):
        where = windows(size, options.whole)
        started = time.process_time()
        mine = quality(ours(size), size, num_keys, where)
        between = time.process_time()
        theirs = quality(randperm(size), size, num_theirs, where)
        seconds = [f"{spent:.0f} s" for spent in (between - started, time.process_time() - between)]
        read = f"{sum(map(len, where))} positions of each ({', '.join(seconds)})"
        print(f"\n{size} samples, {num_keys} and {num_theirs} keys, {read}")
        print(f"{'z-score':>45} {'ours':>7} {'randperm':>9}")
        for name, score in mine.items():
            print(f"{name:>45} {score:7.2f} {theirs.get(name, math.nan):9.2f}")
        worst = [max(abs(score) for score in scores.values()) for scores in (mine, theirs)]
        print(f"{'farthest':>45} {worst[0]:7.2f} {worst[1]:9.2f}", flush=True)


if __name__ == "__main__":
    main()
