"""One copy for each node: the values, the pages, what is left after a crash, and what robomimic's datasets read."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import ddpshim
from ddpshim.data import node_memory
from ddpshim.data.node_memory import shared_arrays
from ddpshim.errors import DataError, RankError, WorldError
from ddpshim.job.world import World
from ddpshim.process import machine, say
from ddpshim.robomimic import batches, datasets, node_cache
from ddpshim.robomimic.options import RobomimicOptions
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


def _die_in(directory: str) -> None:
    seen = []

    def fill(arrays: Mapping[str, torch.Tensor], part: int, num_parts: int) -> None:
        seen.extend(os.listdir(directory))
        if part == 0:
            Path(directory).with_suffix(".seen").write_text(repr(seen))
            os.kill(os.getpid(), signal.SIGKILL)

    machine.memory = lambda *_: machine.Memory(1, 1, None)
    shared_arrays(SPECS, fill, directory=directory)


@pytest.mark.ranks
def test_a_file_on_disk_has_no_name_and_is_gone_with_its_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "place"
    with pytest.raises(RankError):
        run_ranks(_die_in, 2, str(folder))
    assert folder.with_suffix(".seen").read_text() == "[]"
    assert list(folder.iterdir()) == []


def _does_not_fit() -> tuple[str, str, str]:
    here = ddpshim.world()
    with pytest.MonkeyPatch.context() as short:
        short.setattr(machine, "memory", lambda: machine.Memory(2 * 10**6, 2 * 10**6, None))
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
    assert "Name a directory on a local disk, for a file (the option node_memory), or load less" in first[0]
    assert "of others on rank 1 ([('a', (4,), 'torch.float32'), ('a', (5,), 'torch.float32')])" in first[1]
    assert first[1] == second[1]
    assert first[2].startswith("WorldError: rank 1 could not make the arrays that a node shares (KeyError: 'demo_7' (")
    assert second[2] == "KeyError: 'demo_7'"


def test_a_full_directory_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(10**9, 3 * 10**6, None))
    monkeypatch.setattr(node_memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    expected = rf"memory has 3.0 MB available, {tmp_path} has 1.0 MB left; .* Make room, or load"
    with pytest.raises(DataError, match=expected):
        shared_arrays(SPECS, _fill, directory=str(tmp_path), world=World())


def test_a_python_without_memfd_uses_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(node_memory, "_SHARED_MEMORY", str(tmp_path))
    arrays = shared_arrays(SPECS, _fill, world=World())
    assert torch.equal(arrays["a"], _expected("a"))
    assert copy.deepcopy(arrays) is arrays
    assert os.readlink(f"/proc/self/fd/{arrays.descriptor}").startswith(str(tmp_path))
    assert os.listdir(tmp_path) == []


# robomimic's datasets.

OBS = {"eef": (3,), "image": (4, 4, 3), "scalar": ()}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """The first import of robomimic starts a process, which a test of the quick tier may not."""
    with contextlib.suppress(ImportError):
        importlib.import_module("robomimic.utils.dataset")


def _write_demos(path: Path, lengths: tuple[int, ...] = (5, 9, 2, 7)) -> Path:
    h5py, numpy = pytest.importorskip("h5py"), pytest.importorskip("numpy")
    random = numpy.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number, length in enumerate(lengths):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = length
            demo["actions"] = random.normal(size=(length, 2))  # float64, as upstream's cache does not keep it
            for group in ("obs", "next_obs"):
                for key, shape in OBS.items():
                    chunked = number % 2 and key == "eef"  # not in one piece in the file
                    values = random.integers(0, 256, (length, *shape))
                    values = values.astype("uint8") if key == "image" else values / 7
                    demo.create_dataset(f"{group}/{key}", data=values, compression="gzip" if chunked else None)
    return path


def _make(path: Path, mode: str, **options: Any) -> Any:
    pytest.importorskip("robomimic")
    import robomimic.utils.obs_utils as ObsUtils
    from robomimic.utils.dataset import SequenceDataset

    ObsUtils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": ["eef", "scalar"], "rgb": ["image"]}})
    settings = {"seq_length": 3, "frame_stack": 2, **options}
    return SequenceDataset(
        str(path), list(OBS), ("actions", "rewards"), hdf5_cache_mode=mode, hdf5_use_swmr=False, **settings
    )


def _assert_equal(found: Any, expected: Any) -> None:
    import numpy

    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_equal(found[key], expected[key])
    else:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert numpy.array_equal(found, expected)


@pytest.mark.parametrize("mode", ["all", "low_dim"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pad_frame_stack": False, "pad_seq_length": False, "seq_length": 1, "get_pad_mask": True},
        {"goal_mode": "last", "load_next_obs": True},
        {"load_next_obs": False},
    ],
)
def test_a_dataset_reads_the_same(tmp_path: Path, mode: str, options: dict[str, Any]) -> None:
    path = _write_demos(tmp_path / "demos.hdf5")
    upstream = _make(path, mode, **options)
    with node_cache.without_cache(type(upstream)) as waiting:
        shared = _make(path, mode, **options)
    assert node_cache.share(waiting, World()) is None
    node_cache.trim(waiting)
    assert (shared.hdf5_cache_mode, len(shared), str(shared)) == (mode, len(upstream), str(upstream))
    assert dict(shared._index_to_demo_id) == upstream._index_to_demo_id
    for index in range(len(upstream)):
        _assert_equal(shared[index], upstream[index])
    if mode == "low_dim":
        for ep in upstream.demos:
            for key in ("obs/eef", "next_obs/scalar", "actions", "rewards")[:: 1 if upstream.load_next_obs else 2]:
                _assert_equal(shared.get_dataset_for_ep(ep, key), upstream.get_dataset_for_ep(ep, key))
    with pytest.raises(ValueError, match="read-only"):
        shared.get_dataset_for_ep("demo_0", "actions")[0] = 1


def _read(dataset: Any, out: Any) -> None:
    maps = Path("/proc/self/maps").read_text()
    out.send(({index: dataset[index] for index in (0, 8, len(dataset) - 1)}, "memfd:ddpshim" in maps))


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["all", "low_dim"])
def test_batches_and_spawned_workers_have_the_same_copy(tmp_path: Path, mode: str) -> None:
    path = _write_demos(tmp_path / "demos.hdf5")
    upstream = _make(path, mode)
    with node_cache.without_cache(type(upstream)) as waiting:
        shared = _make(path, mode)
    assert node_cache.share(waiting, World()) is None
    assert batches.attach(shared) is None
    node_cache.trim(waiting)
    obs = [f"{group}/{key}" for group in ("next_obs", "obs") for key in OBS if key != "image" or mode == "all"]
    assert sorted(shared.hdf5_cache.flat) == sorted(["actions", "rewards", *obs])
    indices = [7, 0, len(upstream) - 1]
    found = batches.collate(shared.__getitems__(indices))
    _assert_equal(found, default_collate([upstream[index] for index in indices]))
    receive, send = _server.Pipe(duplex=False)
    worker = _server.Process(target=_read, args=(shared, send), daemon=True)
    worker.start()
    try:
        assert receive.poll(60)
        items, has_mapped = receive.recv()
        assert has_mapped
        for index, item in items.items():
            _assert_equal(item, upstream[index])
    finally:
        worker.kill()
        worker.join()


def test_demonstrations_that_are_not_alike_stay_upstreams(tmp_path: Path) -> None:
    import h5py

    path = _write_demos(tmp_path / "demos.hdf5")
    with h5py.File(path, "r+") as file:
        values = file["data/demo_2/obs/eef"][()].astype("float32")
        del file["data/demo_2/obs/eef"]
        file["data/demo_2/obs/eef"] = values
    kind = type(_make(path, "low_dim"))
    with node_cache.without_cache(kind) as waiting:
        _make(path, "all")
    problem = node_cache.share(waiting, World())
    assert problem is not None
    assert problem.startswith(f"{path}: obs/eef of demo_2 is <f4[2, 3], not <f8[2, 3] as after demo_0")


@pytest.mark.parametrize("place", ["auto", "off"])
def test_a_launched_training_shares_where_it_can(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import h5py

    say.say_once.cache_clear()
    here = World(launcher="torchrun", options=RobomimicOptions(node_memory=place))
    monkeypatch.setattr(datasets, "world_of_shares", lambda: here)
    path = _write_demos(tmp_path / "demos.hdf5")
    kind = type(_make(path, "low_dim"))
    train = _Mapping(hdf5_cache_mode="all", data=str(path), dataset_keys=["actions"], num_data_workers=0)
    config = SimpleNamespace(train=train, all_obs_keys=list(OBS))

    def load(obs_keys: list[str]) -> tuple[Any, Any]:
        obs_keys.remove("lang")  # as upstream does, since 0.5.0
        return _make(path, "all"), _make(path, "all", seq_length=1)

    keys = [*OBS, "lang"]
    found = datasets._load_once_a_node(load, keys, kind, config)
    assert keys == list(OBS)
    assert [isinstance(dataset.hdf5_cache, node_cache.Demos) for dataset in found] == [place == "auto"] * 2
    assert [type(dataset.getitem_cache) is list for dataset in found] == [place == "off"] * 2
    with h5py.File(path, "r+") as file:
        file["data/demo_1/obs/extra"] = 1  # not loaded
        del file["data/demo_3/actions"]
        file["data/demo_3/actions"] = [[0.0] * 3] * 7
    found = datasets._load_once_a_node(load, [*OBS, "lang"], kind, config)
    assert type(found[0].getitem_cache) is list
    said = capsys.readouterr().err
    assert ("actions of demo_3 is <f4[7, 3], not <f4[7, 2]" in said) == (place == "auto")
    assert ("each rank loads its own copy, as upstream does" in said) == (place == "auto")


class _Mapping(dict):  # type: ignore[type-arg]
    """robomimic's Config is a mapping with attributes."""

    __getattr__ = dict.__getitem__
