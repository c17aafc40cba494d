"""Measures a node's memory when ranks train on one robomimic dataset (`hdf5_cache_mode=all`).

    python -m evidence.node_memory [--quick]

The benchmark writes a dataset of images and low-dimensional values to a temporary folder. Ranks, with two data workers
each, first read a tiny dataset; the result is the increase of their proportional set sizes (PSS) with the large one.
The released code is measured on a small dataset, since four copies of 17 to 28 times a gigabyte would not fit; its
memory is given per byte of that dataset.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ddpshim
from evidence.results import Result, main
from tests import ranks
from tests.ranks import run_ranks

# Ranks are forked from a process that has imported these: the import takes seconds, and memory that is not the data's.
ranks._server.set_forkserver_preload(["torch", "robomimic.utils.train_utils", "ddpshim.robomimic.calls"])

BENCHMARK = "node_memory"
NUM_RANKS, NUM_WORKERS, SEQ_LENGTH = 4, 2, 10
IMAGE, LOW_DIM = (84, 84, 3), {"eef": 7, "object": 14}
RELEASED = {"DDPSHIM_NODE_MEMORY": "off"}
STEP_BYTES = 2 * (84 * 84 * 3 + (7 + 14) * 8) + 7 * 4


def make_data(path: Path, num_bytes: float, demo_length: int = 100) -> int:
    """Write a dataset of about this size; return its bytes as robomimic keeps them in memory."""
    import h5py
    import numpy as np

    random = np.random.default_rng(0)
    num_demos = max(NUM_RANKS, round(num_bytes / STEP_BYTES / demo_length))
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = "{}"
        for number in range(num_demos):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = demo_length
            demo["actions"] = random.standard_normal((demo_length, 7), dtype=np.float32)
            for group in ("obs", "next_obs"):
                for key, width in LOW_DIM.items():
                    demo[f"{group}/{key}"] = random.standard_normal((demo_length, width))
                demo[f"{group}/image"] = random.integers(0, 256, (demo_length, *IMAGE), dtype=np.uint8)
    return num_demos * demo_length * STEP_BYTES


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):  # upstream's progress bars
        yield


def _config(path: str, cache_mode: str) -> Any:
    import robomimic.utils.obs_utils as ObsUtils
    from robomimic.config import config_factory

    config = config_factory("bc")
    with config.values_unlocked():
        config.train.data, config.train.hdf5_cache_mode, config.train.hdf5_use_swmr = path, cache_mode, False
        config.train.hdf5_load_next_obs = True  # by default False for behaviour cloning
        config.train.seq_length, config.train.dataset_keys = SEQ_LENGTH, ("actions",)
    with _quiet():
        ObsUtils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": list(LOW_DIM), "rgb": ["image"]}})
    return config


def _load(config: Any) -> Any:
    from ddpshim.robomimic import calls

    with _quiet():
        return calls.load_data_for_training(config, [*LOW_DIM, "image"])[0]


def _fetch_sample_by_sample() -> None:
    from ddpshim import adapters
    from ddpshim.robomimic import calls

    adapters.fetcher_of = lambda dataset: None
    calls.batches.WindowFetcher.attach = lambda fetcher: None  # type: ignore[assignment,misc]


def _pss_bytes(pids: list[Any]) -> int:
    found = (re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M) for pid in pids)
    return sum(int(match[1]) * 1024 for match in found if match)


def memory(tiny: str, path: str, every: int, is_released: bool) -> tuple[int, int]:
    """Return the bytes of this rank and its workers after an epoch of `tiny`, then after one of `path` (collective)."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # to allow workers
    if is_released:
        _fetch_sample_by_sample()
    return _after_an_epoch(tiny, 1), _after_an_epoch(path, every)


def _after_an_epoch(path: str, every: int) -> int:
    here, config = ddpshim.world(), _config(path, "all")
    dataset = _load(config)
    batch = 2 * here.world_size
    some = range(0, len(dataset), every)
    loader = ddpshim.make_loader(dataset, batch, sampler=some, num_workers=NUM_WORKERS, persistent_workers=True)
    num_batches = sum(1 for _ in loader)
    assert num_batches == len(some) // batch
    gc.collect()
    here.barrier()
    workers = [worker.pid for worker in multiprocessing.active_children()]
    assert len(workers) == NUM_WORKERS
    found = _pss_bytes(["self", *workers])
    here.barrier()
    return found


def _grown(tiny: Path, path: Path, num_ranks: int, environ: dict[str, str], every: int = 1) -> tuple[int, int]:
    """Return (bytes that ranks and workers have more with `path` than with `tiny`, all their bytes)."""
    found = run_ranks(memory, num_ranks, str(tiny), str(path), every, bool(environ), environ=environ, timeout_s=400)
    return sum(after - before for before, after in found), sum(after for _, after in found)


def run(quick: bool) -> list[Result]:
    """Measure on a dataset of 1 GB; `quick`: of 100 MB."""
    with tempfile.TemporaryDirectory() as folder:
        tiny, small, big = (Path(folder, f"{name}.hdf5") for name in ("tiny", "small", "big"))
        make_data(tiny, 0, demo_length=4)
        raw, raw_small = make_data(big, 1e8 if quick else 1e9), make_data(small, 1e7 if quick else 2.5e7)
        one, all_of_one = _grown(tiny, big, 1, {}, SEQ_LENGTH)
        four, all_of_four = _grown(tiny, big, NUM_RANKS, {}, SEQ_LENGTH)
        released, _ = _grown(tiny, small, NUM_RANKS, RELEASED)
    what = f"PSS of {NUM_RANKS} ranks and {NUM_RANKS * NUM_WORKERS} workers, {raw / 1e6:.0f} MB of data"
    above = "after all of it was read; above what these processes take with 0.7 MB"
    per_byte = (
        f"extrapolated from a dataset of {raw_small / 1e6:.0f} MB, of which released code keeps "
        f"{released / raw_small:.1f} bytes for each in windows of {SEQ_LENGTH} steps; ours {four / raw:.2f} of "
        f"{raw / 1e6:.0f} MB"
    )
    everything = f"with interpreters and libraries {all_of_four / 1e6:.0f} MB and {all_of_one / 1e6:.0f} MB"
    return [
        Result(BENCHMARK, what, four / one, "x one rank", at_most=1.1, note=f"{above}; {everything}"),
        Result(BENCHMARK, what, four / raw, "x the data", at_most=2.0, note=above),
        Result(BENCHMARK, what, four / raw / (released / raw_small), "x released", at_most=0.05, note=per_byte),
    ]


if __name__ == "__main__":
    main(run, __doc__)
