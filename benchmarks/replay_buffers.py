"""Measures samples per second of a replay buffer, with diffusion_policy's sampler and ddpshim's, in alternation.

    python -m benchmarks.replay_buffers [--quick]

Theirs is SequenceSampler over arrays in memory with torch's loader and collate, as their datasets use it; ours is
`make_loader` with `Windows`. Both without workers, on one thread. Needs zarr and numba, and their source tree as
DDPSHIM_UPSTREAM/diffusion_policy.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent.parent))

import ddpshim
from benchmarks.results import Result, alternate, main, ratio
from tests.ranks import run_ranks

HORIZON, BATCH_SIZE = 16, 256  # as in their PushT from states
KINDS = {"states": ["action", "keypoint", "state"], "images": ["action", "img", "state"]}
BATCH_SIZES = {"states": BATCH_SIZE, "images": 64}


class _Theirs(Dataset[Any]):
    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, index: int) -> Any:
        return {key: torch.from_numpy(value) for key, value in self._sampler.sample_sequence(index).items()}


def run(quick: bool) -> list[Result]:
    """Return the ratio of samples per second, ours to theirs."""
    missing = [name for name in ("zarr", "numba") if importlib.util.find_spec(name) is None]
    if not (Path(os.environ.get("DDPSHIM_UPSTREAM", "")) / "diffusion_policy" / "diffusion_policy").is_dir():
        missing.append("DDPSHIM_UPSTREAM/diffusion_policy")
    if missing:
        note = f"not run: {', '.join(missing)} is not here"
        return [Result("replay_buffers", "windows of a replay buffer", math.nan, "x diffusion_policy", note=note)]
    ((found, is_same),) = run_ranks(_measure, 1, 20 if quick else 100, 3 if quick else 9, timeout_s=220)
    results = []
    for kind, seconds in found.items():
        value, quartiles = ratio(seconds["theirs"], seconds["ours"])
        what = f"windows of {HORIZON} steps of {kind} in batches of {BATCH_SIZES[kind]}"
        note = "batches equal to the last bit" if is_same[kind] else "BATCHES DIFFER"
        unit = "x diffusion_policy's samples/s"
        results.append(Result("replay_buffers", what, value, unit, quartiles, at_least=1.0, note=note))
    return results


def _measure(num_episodes: int, num_rounds: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, bool]]:
    sys.path.insert(0, str(Path(os.environ["DDPSHIM_UPSTREAM"]) / "diffusion_policy"))
    found, is_same = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "pusht.zarr")
        _write(path, num_episodes)
        for kind, keys in KINDS.items():
            padded = {"pad_before": 1, "pad_after": 7}
            sampler = importlib.import_module("diffusion_policy.common.sampler")
            buffers = importlib.import_module("diffusion_policy.common.replay_buffer")
            buffer = buffers.ReplayBuffer.copy_from_path(path, keys=keys)
            theirs = _Theirs(sampler.SequenceSampler(buffer, HORIZON, keys=keys, **padded))
            ours = ddpshim.Windows(ddpshim.load_replay_buffer(path, keys), HORIZON, **padded)
            size = BATCH_SIZES[kind]
            loaders = {"theirs": DataLoader(theirs, size, shuffle=True, drop_last=True)}
            loaders["ours"] = ddpshim.make_loader(ours, size, shuffle=True)
            passes = {name: _batches(loader) for name, loader in loaders.items()}
            found[kind] = alternate({name: lambda p=p: _seconds(p) for name, p in passes.items()}, num_rounds)
            one, other = ((theirs[i] for i in range(len(theirs))), (ours[i] for i in range(len(ours))))
            is_same[kind] = len(theirs) == len(ours) and all(
                torch.equal(a[key], b[key]) for a, b in zip(one, other) for key in keys
            )
    return found, is_same


def _batches(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _seconds(batches: Iterator[Any], num: int = 20) -> float:
    start = time.perf_counter()
    for _ in range(num):
        next(batches)
    return time.perf_counter() - start


def _write(path: str, num_episodes: int) -> None:
    """Write arrays of PushT's shapes with random numbers."""
    import zarr

    random = np.random.default_rng(0)
    ends = np.cumsum(random.integers(50, 250, num_episodes))
    root = zarr.open(path, mode="w")
    data, meta = root.create_group("data"), root.create_group("meta")
    shapes = {"state": (5,), "action": (2,), "keypoint": (9, 2)}
    for key, shape in shapes.items():
        data.array(key, random.random((ends[-1], *shape), dtype=np.float32), chunks=(161, *shape))
    image = random.integers(0, 256, (ends[-1], 96, 96, 3), dtype=np.uint8)
    data.array("img", image, chunks=(161, 96, 96, 3))
    meta.array("episode_ends", ends)


if __name__ == "__main__":
    main(run, __doc__)
