"""Measures robomimic's sequence datasets in samples per second, as released and fetched by the batch, in alternation.

    python -m benchmarks.data_path [--quick]

Windows of 10 steps of low-dim data in batches of 256, from the Lift demonstrations (five copies without --quick). The
released loader is torch's, as robomimic's trainer makes it; ours is the loader that a launched trainer gets instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch
from torch.utils.data import DataLoader

from benchmarks.results import Result, alternate, main, ratio
from tests.preloaded import as_torchrun_says

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples" / "data" / "lift_scripted200_train.hdf5"
LOW_DIM = ["robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object"]
BATCH_SIZE, SEQ_LENGTH, NUM_WORKERS = 256, 10, 2
NUM_COPIES = 5  # of the demonstrations, without --quick


def make_data(folder: Path, num_copies: int) -> Path:
    """Write `num_copies` of the Lift demonstrations to a file, and return its path."""
    import h5py

    path = folder / "lift.hdf5"
    with h5py.File(DATA) as given, h5py.File(path, "w") as made:
        made.create_group("data").attrs.update(given["data"].attrs)
        for number, name in enumerate([*given["data"]] * num_copies):
            given.copy(f"data/{name}", made["data"], f"demo_{number}")
    return path


def _dataset(path: str, cache_mode: Optional[str]) -> Any:
    import robomimic.utils.obs_utils as ObsUtils
    from robomimic.utils.dataset import SequenceDataset

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        ObsUtils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": LOW_DIM}})
        return SequenceDataset(
            hdf5_path=path,
            obs_keys=LOW_DIM,
            dataset_keys=["actions", "rewards", "dones"],
            seq_length=SEQ_LENGTH,
            hdf5_cache_mode=cache_mode,
            load_next_obs=False,
        )


class _Arm:
    """A loader whose passes are started and abandoned."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: Iterator[Any] = iter(())

    def restart_s(self) -> float:
        """Return the seconds to the first batch of a new pass; non-persistent workers end first."""
        start = time.perf_counter()
        self._batches = iter(())
        self._batches = iter(self._loader)
        next(self._batches)
        return time.perf_counter() - start

    def batch_s(self, num_batches: int) -> float:
        """Return the time of one batch in the middle of a pass, after those that workers have prefetched."""
        self.restart_s()
        for _ in range(2 * self._loader.num_workers):
            next(self._batches)
        start = time.perf_counter()
        for _ in range(num_batches):
            next(self._batches)
        return (time.perf_counter() - start) / num_batches


def _measure(path: str, cache_mode: Optional[str], num_workers: int, num_rounds: int, num_batches: int) -> Any:
    """Return the seconds of a batch and of a restart, for both loaders, by round."""
    from ddpshim.robomimic.datasets import loader

    options: Any = {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": num_workers, "drop_last": True}
    released = _Arm(DataLoader(_dataset(path, cache_mode), **options))
    ours = _Arm(loader(dataset=_dataset(path, cache_mode), **options))
    for arm in (released, ours):
        arm.restart_s()
    batches = alternate(
        {"released": lambda: released.batch_s(num_batches), "ours": lambda: ours.batch_s(num_batches)}, num_rounds
    )
    restarts = alternate({"released": released.restart_s, "ours": ours.restart_s}, num_rounds if num_workers else 0)
    return batches, restarts


def _results(path: str, quick: bool) -> list[Result]:
    """Return all results, in a process that was launched as a world of one."""
    import ddpshim

    torch.set_num_threads(1)
    ddpshim.setup(seed=1)
    results = []
    for cache_mode in ("low_dim", "all", None):
        # Without a cache the released loader takes half a second for a batch.
        num_rounds, num_batches = (3, 2) if cache_mode is None else (4, 8) if quick else (11, 64)
        # Without a cache, workers take seconds to begin a pass.
        for num_workers in (0,) if quick and cache_mode is None else (0, NUM_WORKERS):
            batches, restarts = _measure(path, cache_mode, num_workers, num_rounds, num_batches)
            what = f"hdf5_cache_mode={cache_mode}, {num_workers} workers"
            value, quartiles = ratio(batches["released"], batches["ours"])
            note = f"{BATCH_SIZE / sorted(batches['ours'])[num_rounds // 2]:.0f} samples a second"
            unit = "x the released loader"
            results.append(Result("data_path", f"samples a second, {what}", value, unit, quartiles, None, 10, note))
            if num_workers:
                value, quartiles = ratio(restarts["ours"], restarts["released"])
                note = f"{sorted(restarts['ours'])[num_rounds // 2] * 1000:.1f} ms to the first batch"
                name = f"beginning a pass anew, {what}"
                results.append(Result("data_path", name, value, unit, quartiles, 0.2, note=note))
    ddpshim.cleanup()
    return results


def save_results(path: str, found: str, quick: str) -> None:
    """Measure in this process, and write the results to the file `found`."""
    results = _results(path, bool(int(quick)))
    Path(found).write_text(json.dumps([asdict(result) for result in results]), encoding="utf-8")


def run(quick: bool) -> list[Result]:
    """Return ratios of samples per second, without workers and with two, and of the time to begin a new pass."""
    with tempfile.TemporaryDirectory() as folder:
        path, found = make_data(Path(folder), 1 if quick else NUM_COPIES), Path(folder) / "found.json"
        code = "import sys; from benchmarks import data_path; data_path.save_results(*sys.argv[1:])"
        command = [sys.executable, "-c", code, str(path), str(found), str(int(quick))]
        environ = {**os.environ, **as_torchrun_says(1)[0], "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, env=environ, timeout=600, check=True)
        return [Result(**result) for result in json.loads(found.read_text())]


if __name__ == "__main__":
    main(run, __doc__)
