"""Saving that does not stop the ranks: the same file, whole or absent, and no error of the writing thread is lost."""

from __future__ import annotations

import collections
import io
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpshim
from ddpshim.checkpoint import files as checkpoint
from ddpshim.errors import CheckpointError, RankError
from ddpshim.failures import failure
from ddpshim.process import machine
from tests.preloaded_commands import patience
from tests.ranks import run_ranks


def _training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(3, 7)).sum().backward()
    optimizer.step()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "module": net, "epoch": 3}


def _odd_tensors() -> dict[str, Any]:
    base = torch.arange(24.0)
    return {
        "views": (base, base[3:9], base.view(4, 6).t(), base[::5]),
        "types": [torch.zeros(3, dtype=t) for t in (torch.bfloat16, torch.bool, torch.complex64, torch.int8)],
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "parameter": nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "storage": torch.arange(5).untyped_storage(),
        "no tensor": collections.OrderedDict([(1, None), ("text", "x" * 70_000), (3, {4, 5})]),
    }


def _stopped(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written when the event is set."""
    go_on, write = threading.Event(), checkpoint._write

    def write_later(*args: Any) -> None:
        assert go_on.wait(patience(30))
        write(*args)

    monkeypatch.setattr(checkpoint, "_write", write_later)
    return go_on


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpoint, "_LEAST_BYTES", 0)
    yield
    checkpoint.flush()


@pytest.mark.unit
def test_the_file_is_that_of_torch_to_the_byte(tmp_path: Path, small: None) -> None:
    ours = tmp_path / "ours" / "a.pth"
    ours.parent.mkdir()
    for make in (_training_state, _odd_tensors, lambda: 1, lambda: "ünï" * 1000, _training_state, _training_state):
        obj, stream = make(), io.BytesIO()
        torch.save(obj, stream)
        checkpoint.save_in_background(obj, ours)
        checkpoint.flush()
        assert ours.read_bytes() == stream.getvalue()
        torch.save(obj, tmp_path / "a.pth")
        checkpoint.save(obj, ours)
        assert ours.read_bytes() == (tmp_path / "a.pth").read_bytes()
    assert checkpoint.find_damage(ours) is None


def test_a_fork_has_no_thread_and_waits_for_none(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = _stopped(monkeypatch)
    checkpoint.save_in_background({"number": 1}, tmp_path / "a.pth")
    child = os.fork()
    if child == 0:
        os._exit(int(checkpoint._busy() is not None))
    assert os.waitpid(child, 0)[1] == 0
    assert checkpoint._busy() is not None
    go_on.set()


def test_a_file_comes_a_moment_later_and_whoever_looks_waits(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, path = {**_training_state(), "seen": [1]}, tmp_path / "last.pth"
    weight = state["net"]["0.weight"].clone()
    checkpoint.save({"number": 0}, path)
    go_on = _stopped(monkeypatch)
    checkpoint.save_in_background({"number": 1, **state}, path)
    checkpoint.copy(path, tmp_path / "last_bak.pth")
    state["net"]["0.weight"].fill_(9)  # later than the snapshot
    state["seen"].append(2)
    assert torch.load(path) == {"number": 0}
    assert os.listdir(tmp_path) == ["last.pth"]
    go_on.set()
    assert checkpoint.find_latest(tmp_path, "last.pth") == path
    for name in ("last.pth", "last_bak.pth"):
        loaded = torch.load(tmp_path / name, weights_only=False)
        assert (loaded["number"], loaded["seen"]) == (1, [1])
        assert torch.equal(loaded["net"]["0.weight"], weight)
    assert sorted(os.listdir(tmp_path)) == ["last.pth", "last_bak.pth"]
    checkpoint.save_in_background({"number": 2}, path)
    checkpoint.save({"number": 3}, path)
    assert torch.load(path) == {"number": 3}
    checkpoint.save_in_background({"number": 4}, path)
    checkpoint.copy(path, tmp_path / "again.pth")
    checkpoint.flush()
    assert torch.load(tmp_path / "again.pth") == {"number": 4}
    (tmp_path / "again.pth").unlink()
    checkpoint.save_in_background({"number": 5}, path)
    assert len(checkpoint.keep_newest(tmp_path, "*.pth", 1)) == 1
    assert torch.load(path) == {"number": 5}


def test_small_files_impossible_places_and_a_lack_of_memory_are_seen_to_at_once(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.save_in_background(1, tmp_path / "nowhere" / "a.pth")
    with pytest.raises(Exception, match=r"[Pp]ickle"):
        checkpoint.save_in_background(lambda: None, tmp_path / "a.pth")
    assert os.listdir(tmp_path) == []
    go_on = _stopped(monkeypatch)
    monkeypatch.setattr(checkpoint, "_LEAST_BYTES", 1000)
    checkpoint.save_in_background(torch.zeros(10), tmp_path / "small.pth")
    monkeypatch.setattr(machine, "memory", lambda: machine.MainMemory(5_000_000, None))
    checkpoint.save_in_background(torch.zeros(1_000_000), tmp_path / "large.pth")
    assert sorted(os.listdir(tmp_path)) == ["large.pth", "small.pth"]
    go_on.set()


@pytest.fixture
def full_disk(tmp_path: Path, small: None) -> Iterator[None]:
    checkpoint.save("old", tmp_path / "a.pth")
    checkpoint.save(torch.zeros(10_000), tmp_path / "big.pth")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path: Path, full_disk: None) -> None:
    for write, source in ((checkpoint.save, torch.zeros(10_000)), (checkpoint.copy, tmp_path / "big.pth")):
        with pytest.raises(CheckpointError, match=r"could not be written \(.*, [\d,]+ bytes free"):
            write(source, tmp_path / "a.pth")
    assert torch.load(tmp_path / "a.pth") == "old"
    assert sorted(os.listdir(tmp_path)) == ["a.pth", "big.pth"]


def test_an_error_in_the_background_comes_with_the_next_call_once(
    tmp_path: Path, full_disk: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.pth"
    text = rf"{path} could not be written .* bytes free"

    def save() -> None:
        checkpoint.save_in_background(torch.zeros(10_000), path)

    save()
    checkpoint.copy(path, tmp_path / "b.pth")
    with pytest.raises(CheckpointError, match=rf"{text}.*Left out because of it: _copy.*b.pth"):
        save()
    save()
    with pytest.raises(CheckpointError, match=text):
        checkpoint.flush()
    checkpoint.flush()
    # At the end of a program that ends well, of one that has failed already, and in `cleanup`.
    aborted: list[BaseException] = []
    monkeypatch.setattr(failure, "abort", aborted.append)
    save()
    checkpoint._at_exit()
    assert "could not be written" in str(aborted[0])
    save()
    with pytest.raises(CheckpointError, match=text):
        checkpoint._at_cleanup()
    assert torch.load(path) == "old"
    assert sorted(os.listdir(tmp_path)) == ["a.pth", "big.pth"]


def _rank_saves(path: str) -> None:
    checkpoint._LEAST_BYTES = 0
    rank = ddpshim.world().rank
    checkpoint.save_in_background(torch.full((1000,), float(rank)), path)
    assert (checkpoint._busy() is not None) == (rank == 0)
    if rank == 0:
        checkpoint.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        checkpoint.save_in_background(torch.ones(1000), path)
    try:
        ddpshim.cleanup()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.ranks
def test_the_main_rank_saves_and_cleanup_raises_what_it_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2 failed first:(?s:.*)CheckpointError: .*could not be written"):
        run_ranks(_rank_saves, 2, str(tmp_path / "a.pth"))
    assert torch.load(tmp_path / "a.pth").eq(0).all()
    assert os.listdir(tmp_path) == ["a.pth"]
