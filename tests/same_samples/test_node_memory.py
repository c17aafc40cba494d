"""One copy for each node: the values, the pages, what is left after a crash, and what robomimic's datasets read."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import ddpshim
from ddpshim.errors import DataError, WorldError
from ddpshim.job.world import World
from ddpshim.options import Options
from ddpshim.process import machine
from ddpshim.robomimic import batches, calls, node_memory
from ddpshim.robomimic.node_memory import shared_arrays
from tests import sequences as demos
from tests.ranks import _server, run_ranks

MEGABYTES = 32
SPECS = {
    "a": ((3, 5), torch.float64),
    "none": ((0, 4), torch.float32),
    "big": ((MEGABYTES << 18,), torch.float32),
    "flags": ((7,), torch.bool),
}


def _fill(arrays: Mapping[str, torch.Tensor], part: int, num_parts: int) -> None:
    for name, array in arrays.items():
        array[part::num_parts] = _expected(name)[part::num_parts]


def _expected(name: str) -> torch.Tensor:
    shape, dtype = SPECS[name]
    return torch.arange(torch.Size(shape).numel()).mul(7).remainder(11).reshape(shape).to(dtype)


def _own_kilobytes() -> int:
    """The proportional set size of this process in what arrays lie in: a page that two have counts half."""
    found = 0
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if "memfd:ddpshim" in part.split("\n", 1)[0]:
            found += int(re.findall(r"^Pss: +(\d+) kB", part, re.MULTILINE)[0])
    return found


def _share_and_measure() -> tuple[bool, int, list[str]]:
    order = reversed if ddpshim.world().rank else list  # as names that come from a set
    arrays = shared_arrays({name: SPECS[name] for name in order(list(SPECS))}, _fill)
    is_equal = all(torch.equal(arrays[name], _expected(name)) for name in arrays)
    ddpshim.world().barrier()  # both have looked at every page
    kilobytes = _own_kilobytes()
    ddpshim.world().barrier()
    return is_equal, kilobytes, list(arrays)


@pytest.mark.ranks
def test_ranks_share_one_copy() -> None:
    found = run_ranks(_share_and_measure, 2)
    assert [(is_equal, names) for is_equal, _, names in found] == [(True, sorted(SPECS))] * 2
    total = sum(kilobytes for _, kilobytes, _ in found)
    assert MEGABYTES * 1024 <= total <= MEGABYTES * 1024 * 1.02


def _does_not_fit() -> tuple[str, str, str]:
    here = ddpshim.world()
    with pytest.MonkeyPatch.context() as short:
        short.setattr(machine, "memory", lambda: machine.MainMemory(2 * 10**6, None))
        with pytest.raises(DataError) as small:
            shared_arrays(SPECS, _fill)
    with pytest.raises(DataError) as unlike:
        shared_arrays({"a": ((4 + here.rank,), torch.float32)}, _fill)

    def fill(arrays: Mapping[str, torch.Tensor], part: int, num_parts: int) -> None:
        if part == 1:
            raise KeyError("demo_7")

    with pytest.raises((WorldError, KeyError)) as broken:
        shared_arrays({"a": ((4,), torch.float32)}, fill)
    return str(small.value), str(unlike.value), f"{type(broken.value).__name__}: {broken.value}"


@pytest.mark.ranks
def test_no_room_unlike_specs_and_a_part_that_fails_are_told_on_all_ranks() -> None:
    first, second = run_ranks(_does_not_fit, 2)
    assert second[0] == f"on rank 0: {first[0]}"
    assert "one copy of the data for this node takes 33.6 MB, and memory has 2.0 MB available;" in first[0]
    assert "Make room, or load less" in first[0]
    assert "of others on rank 1 ([('a', (4,), 'torch.float32'), ('a', (5,), 'torch.float32')])" in first[1]
    assert first[1] == second[1]
    assert first[2].startswith("WorldError: rank 1 could not make the arrays that a node shares (KeyError: 'demo_7' (")
    assert second[2] == "KeyError: 'demo_7'"


def test_a_python_without_memfd_uses_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(node_memory, "_SHARED_MEMORY", str(tmp_path))
    arrays = shared_arrays(SPECS, _fill, world=World())
    assert torch.equal(arrays["a"], _expected("a"))
    assert copy.deepcopy(arrays) is arrays
    assert os.readlink(f"/proc/self/fd/{arrays.descriptor}").startswith(str(tmp_path))
    assert os.listdir(tmp_path) == []


# robomimic's datasets.


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """The first import of robomimic starts a process, which a test of the quick tier may not."""
    with contextlib.suppress(ImportError):
        importlib.import_module("robomimic.utils.dataset")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("robomimic")
    demos.begin()
    return tmp_path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(node_memory, "say_once", lines.append)
    return lines


def _shared(folder: Path, mode: str, **settings: Any) -> tuple[Any, Any]:
    """A dataset with upstream's cache, and one with the node's."""
    upstream = demos.make(folder, mode, **settings)
    with node_memory.shared_cache(type(upstream), World()):
        shared = demos.make(folder, mode, **settings)
    assert isinstance(shared.hdf5_cache, node_memory.Demos)
    return upstream, shared


@pytest.mark.parametrize("mode", ["all", "low_dim"])
@pytest.mark.parametrize("kind", ["stacked sequences", "whole stacks", "goals", "no next_obs", "images"])
def test_a_dataset_reads_the_same(folder: Path, mode: str, kind: str) -> None:
    name = demos.make_file(folder / "zipped.hdf5", compression="gzip" if kind == "goals" else None).name
    upstream, shared = _shared(folder, mode, file=name, **demos.KINDS[kind])
    assert (shared.hdf5_cache_mode, len(shared), str(shared)) == (mode, len(upstream), str(upstream))
    assert dict(shared._index_to_demo_id) == upstream._index_to_demo_id
    assert demos.is_same_batch(shared, upstream)
    if mode == "low_dim":
        for ep in upstream.demos:
            for key in ("obs/eef_pos", "next_obs/object", "actions", "rewards")[:: 1 if upstream.load_next_obs else 2]:
                found, expected = (one.get_dataset_for_ep(ep, key) for one in (shared, upstream))
                assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
    with pytest.raises(ValueError, match="read-only"):
        shared.get_dataset_for_ep("demo_0", "actions")[0] = 1


def _read(dataset: Any, out: Any) -> None:
    maps = Path("/proc/self/maps").read_text()
    out.send(([dataset[index] for index in INDICES], "memfd:ddpshim" in maps))


INDICES = [7, 0, 20]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["all", "low_dim"])
def test_batches_and_spawned_workers_have_the_same_copy(folder: Path, mode: str) -> None:
    upstream, shared = _shared(folder, mode, **demos.KINDS["images"])
    expected = default_collate([upstream[index] for index in INDICES])
    assert batches.WindowFetcher(shared).attach() is None
    assert batches._is_same(demos.fetch(shared, INDICES), expected)
    receive, send = _server.Pipe(duplex=False)
    worker = _server.Process(target=_read, args=(shared, send), daemon=True)
    worker.start()
    try:
        assert receive.poll(60)
        samples, has_mapped = receive.recv()
        assert has_mapped
        assert batches._is_same(default_collate(samples), expected)
    finally:
        worker.kill()
        worker.join()


def test_demonstrations_that_are_not_alike_stay_upstreams(folder: Path, said: list[str]) -> None:
    path = demos.make_file(folder / "odd.hdf5")
    with demos.h5py.File(path, "r+") as file:
        values = file["data/demo_2/obs/eef_pos"][()].astype("float32")
        del file["data/demo_2/obs/eef_pos"]
        file["data/demo_2/obs/eef_pos"] = values
    kind = type(demos.make(folder, "low_dim", file=path.name))
    with node_memory.shared_cache(kind, World()):
        made = demos.make(folder, "all", file=path.name)
    assert (made.hdf5_cache, type(made.getitem_cache)) == (None, list)
    assert said[0].startswith(f"{path}: obs/eef_pos of demo_2 is <f4[7, 3], not <f8[7, 3] as after demo_0")


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_launched_training_shares_where_it_can(
    folder: Path, is_shared: bool, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    here = World(launcher="torchrun", world_size=2, options=Options(node_memory=is_shared))
    monkeypatch.setattr(calls, "world", lambda: here)
    shared_cache = node_memory.shared_cache
    monkeypatch.setattr(node_memory, "shared_cache", lambda kind, here: shared_cache(kind, World()))
    path = demos.make_file(folder / "demos.hdf5")
    config = SimpleNamespace(train=SimpleNamespace(hdf5_cache_mode="all"))

    def load(config: Any, obs_keys: list[str]) -> tuple[Any, Any]:
        obs_keys.remove("lang")  # as upstream does, since 0.5.0
        made = (demos.make(folder, "all", file=path.name, hdf5_use_swmr=False, seq_length=n) for n in (3, 1))
        return tuple(made)  # type: ignore[return-value]

    monkeypatch.setitem(sys.modules, "robomimic.utils.train_utils", SimpleNamespace(load_data_for_training=load))
    keys = [*demos.LOW_DIM, "lang"]
    found = calls.load_data_for_training(config, obs_keys=keys)
    assert keys == [*demos.LOW_DIM]
    assert [isinstance(dataset.hdf5_cache, node_memory.Demos) for dataset in found] == [is_shared] * 2
    assert [type(dataset.getitem_cache) is list for dataset in found] == [not is_shared] * 2
    with demos.h5py.File(path, "r+") as file:
        file["data/demo_1/obs/extra"] = 1  # not loaded
        del file["data/demo_3/actions"]
        file["data/demo_3/actions"] = [[0.0] * 3] * 9
    found = calls.load_data_for_training(config, obs_keys=[*demos.LOW_DIM, "lang"])
    assert type(found[0].getitem_cache) is list
    assert len(said) == 2 * is_shared
    for line in said:
        assert "actions of demo_3 is <f4[9, 3], not <f4[9, 7]" in line
        assert "each rank loads its own copy, as upstream does" in line
