"""Saving that does not stop the ranks: the same file, whole or absent, and no error of the writing process is lost."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpshim
from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint.background import Background, Buffer, JobFailed, take
from ddpshim.errors import CheckpointError, RankError
from ddpshim.failures import failure
from ddpshim.process import machine
from tests.preloaded_commands import python
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no memory without a name")


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


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    made = Buffer()
    yield made
    made.close()


def _written(obj: Any, folder: Path, buffer: Buffer) -> bytes:
    folder.mkdir(exist_ok=True)
    take(obj, buffer, 100).write(str(folder / "a.pth"))
    return (folder / "a.pth").read_bytes()


@pytest.mark.unit
def test_the_file_is_that_of_torch_to_the_byte(tmp_path: Path, buffer: Buffer) -> None:
    for make in (_training_state, _odd_tensors, lambda: 1, lambda: "ünï" * 1000, _training_state):
        obj = make()
        torch.save(obj, tmp_path / "a.pth")
        assert _written(obj, tmp_path / "ours", buffer) == (tmp_path / "a.pth").read_bytes()
    assert checkpoint.find_damage(tmp_path / "ours" / "a.pth") is None


@pytest.mark.unit
def test_memory_that_a_thread_grows_meanwhile_is_copied_to_all_the_same(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = ctypes.memmove

    def grown_meanwhile(*args: Any) -> None:
        buffer.grow(buffer.num_bytes + 100_000)
        copy(*args)

    monkeypatch.setattr(ctypes, "memmove", grown_meanwhile)
    torch.save(_odd_tensors(), tmp_path / "a.pth")
    assert _written(_odd_tensors(), tmp_path / "ours", buffer) == (tmp_path / "a.pth").read_bytes()


@pytest.mark.unit
def test_memory_that_is_given_back_grows_no_more(tmp_path: Path) -> None:
    buffer = Buffer()
    number = buffer.descriptor
    with open(tmp_path / "another.txt", "w+b") as file:
        buffer.close()
        os.dup2(file.fileno(), number)  # as the next file that is opened gets it
        try:
            with pytest.raises(OSError, match="Bad file descriptor"):
                buffer.grow(100)
        finally:
            os.close(number)
    assert (tmp_path / "another.txt").stat().st_size == 0


# The process. These start one that imports no torch, which is quick.


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background("ddpshim.errors")
    made.do(os.getpid, "start")
    assert made.wait(30)
    yield made
    made._process.kill()
    made._process.wait()
    made._ours.close()


def test_jobs_are_done_in_order_and_not_after_one_that_failed(tmp_path: Path, background: Background) -> None:
    os.kill(background.pid, signal.SIGSTOP)
    background.do(functools.partial(os.mkdir, tmp_path / "a"), "make a")
    background.do(functools.partial(os.mkdir, tmp_path / "a" / "b"), "make b")
    assert background.is_busy
    assert not background.wait(0.05)
    assert os.listdir(tmp_path) == []
    os.kill(background.pid, signal.SIGCONT)
    assert background.wait()
    assert (tmp_path / "a" / "b").is_dir()
    background.do(functools.partial(os.rmdir, tmp_path / "a"), "remove a")
    background.do(functools.partial(os.mkdir, tmp_path / "c"), "make c")
    background.do(functools.partial(os.mkdir, tmp_path / "d"), "make d")
    with pytest.raises(JobFailed, match=r"(?s)Directory not empty.*Left out because of it: make c, make d"):
        background.wait()
    assert not background.is_busy
    background.do(functools.partial(os.mkdir, tmp_path / "e"), "make e")
    assert background.wait()
    assert sorted(os.listdir(tmp_path)) == ["a", "e"]


def test_signals_to_the_job_do_not_end_it_and_a_kill_is_an_error(tmp_path: Path, background: Background) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(background.pid, number)
    background.do(functools.partial(os.mkdir, tmp_path / "a"), "make a")
    assert background.wait()
    os.kill(background.pid, signal.SIGSTOP)
    background.do(functools.partial(os.mkdir, tmp_path / "b"), "make b")
    os.kill(background.pid, signal.SIGKILL)
    with pytest.raises(JobFailed, match=rf"pid {background.pid}\) ended \(SIGKILL\) before this was done: make b"):
        background.wait()
    assert background.has_ended
    assert os.listdir(tmp_path) == ["a"]


def test_where_it_does_not_start_jobs_are_done_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    background = Background("ddpshim.no_such_module")
    background.do(functools.partial(os.mkdir, tmp_path / "a"), "make a")
    with pytest.warns(UserWarning, match=r"did not start \(exit code 1, .*training waits"):
        assert background.wait()
    assert background.did_not_start
    assert os.listdir(tmp_path) == ["a"]
    assert "no_such_module" in capfd.readouterr().err
    background.end()


def test_it_ends_when_it_is_let_go_whoever_holds_the_connection() -> None:
    background = Background("ddpshim.errors")
    background.do(os.getpid, "start")
    assert background.wait(30)
    held = os.dup(background._ours.fileno())  # as a data worker that was forked holds it
    background.end()
    os.close(held)
    assert background._process.returncode == 0


PARENT = """
import functools, os, signal, sys, time
from ddpshim.checkpoint.background import Background
background = Background("ddpshim.errors")
background.do(os.getpid, "start")
background.wait()
worker = os.fork()
if worker == 0:
    if sys.argv[2] != "holds":
        background._ours.close()
    os.close(1)
    time.sleep(60)
background.do(functools.partial(time.sleep, 0.2), "take some time")
background.do(functools.partial(os.mkdir, sys.argv[1]), "make it")
print(background.pid, worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _command_of(pid: int) -> bytes:
    """Nothing where there is no such process, or it ends while one looks."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.parametrize("worker", ["holds", "holds nothing"])  # of this end of the connection, and lives on
def test_it_ends_with_a_parent_that_was_killed(tmp_path: Path, worker: str) -> None:
    said = python("-c", PARENT, str(tmp_path / "a"), worker, code=-signal.SIGKILL)
    pid, of_worker = map(int, said.split())
    end = time.monotonic() + 30
    while b"background" in _command_of(pid):
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.05)
    os.kill(of_worker, signal.SIGKILL)
    assert (tmp_path / "a").exists(), "what was on its way is finished"


# Checkpoints.


@pytest.fixture(scope="module")
def started() -> Iterator[None]:
    """The process, with torch in it, for the tests below."""
    checkpoint._writer.start().do(os.getpid, "start")
    yield
    checkpoint._writer.end()
    gc.collect()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, started: None) -> Iterator[None]:
    monkeypatch.setattr(checkpoint, "_LEAST_BYTES", 0)
    yield
    os.kill(checkpoint._writer.start().pid, signal.SIGCONT)  # a test that failed may have left it as `_stop` does
    checkpoint.flush()


def _stop() -> int:
    checkpoint.flush()
    pid = checkpoint._writer.start().pid
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_file_comes_a_moment_later_and_whoever_looks_waits(tmp_path: Path, small: None) -> None:
    state, path = {**_training_state(), "seen": [1]}, tmp_path / "last.pth"
    weight = state["net"]["0.weight"].clone()
    checkpoint.save({"number": 0}, path)
    pid = _stop()
    checkpoint.save_in_background({"number": 1, **state}, path)
    checkpoint.copy_in_background(path, tmp_path / "last_bak.pth")
    state["net"]["0.weight"].fill_(9)  # later than the snapshot
    state["seen"].append(2)
    assert torch.load(path) == {"number": 0}
    assert os.listdir(tmp_path) == ["last.pth"]
    os.kill(pid, signal.SIGCONT)
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
    assert torch.load(tmp_path / "again.pth") == {"number": 4}
    (tmp_path / "again.pth").unlink()
    checkpoint.save_in_background({"number": 5}, path)
    assert len(checkpoint.keep_newest(tmp_path, "*.pth", 1)) == 1
    assert torch.load(path) == {"number": 5}


def test_what_torch_saves_in_a_block_goes_to_the_background(tmp_path: Path, small: None) -> None:
    path, save = str(tmp_path / "a.pth"), torch.save
    pid = _stop()
    with checkpoint.written(path, in_background=True) as name:
        torch.save({"a": 1}, name)
        assert f"{name}" == path
    assert torch.save is save
    assert os.listdir(tmp_path) == []
    os.kill(pid, signal.SIGCONT)
    checkpoint.flush()
    assert torch.load(path) == {"a": 1}
    with checkpoint.written(path, in_background=True) as name:
        Path(name).write_text("no checkpoint of torch's")
    assert Path(path).read_text() == "no checkpoint of torch's"


def test_small_files_and_impossible_places_are_seen_to_at_once(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.save_in_background(1, tmp_path / "nowhere" / "a.pth")
    with pytest.raises(Exception, match=r"[Pp]ickle"):
        checkpoint.save_in_background(lambda: None, tmp_path / "a.pth")
    assert os.listdir(tmp_path) == []
    pid = _stop()
    monkeypatch.setattr(checkpoint, "_LEAST_BYTES", 1000)
    checkpoint.save_in_background(torch.zeros(10), tmp_path / "small.pth")
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(None, 5_000_000, None))
    there = checkpoint._writer.buffer.num_bytes  # from another test: it takes what is beyond that
    checkpoint.save_in_background(torch.zeros(there // 4 + 1_000_000), tmp_path / "large.pth")
    assert sorted(os.listdir(tmp_path)) == ["large.pth", "small.pth"]
    os.kill(pid, signal.SIGCONT)


def test_without_room_for_the_copy_it_is_saved_at_once(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any) -> None:
        raise OSError(28, "No space left on device (on purpose)")

    monkeypatch.setattr(Buffer, "put", no_memory)
    with pytest.warns(UserWarning, match=r"a.pth was written while training waited, .*on purpose"):
        checkpoint.save_in_background(1, tmp_path / "a.pth")
    assert torch.load(tmp_path / "a.pth") == 1


def _fill_the_disk() -> None:
    checkpoint.flush()
    resource.prlimit(checkpoint._writer.start().pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


@pytest.fixture
def full_disk(small: None) -> Iterator[None]:
    _fill_the_disk()
    yield
    resource.prlimit(
        checkpoint._writer.start().pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )


def test_an_error_in_the_background_comes_with_the_next_call_once(
    tmp_path: Path, full_disk: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.pth"
    checkpoint.save_whole(torch.save, "old", path)
    text = rf"{path} could not be written .* 40,000 bytes needed"

    def save() -> None:
        checkpoint.save_in_background(torch.zeros(10_000), path)

    save()
    checkpoint.copy_in_background(path, tmp_path / "b.pth")
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
    assert torch.load(path) == "old"
    assert os.listdir(tmp_path) == ["a.pth"]


def test_a_writer_that_is_killed_is_an_error_and_then_replaced(tmp_path: Path, small: None) -> None:
    path = tmp_path / "a.pth"
    checkpoint.save(torch.zeros(10), path)
    pid = _stop()
    checkpoint.save_in_background(torch.ones(10), path)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match=rf"ended \(SIGKILL\) before this was done: {path}"):
        checkpoint.save_in_background(torch.ones(10), path)
    assert torch.load(path).eq(0).all()
    checkpoint.save_in_background(torch.full((10,), 2.0), path)
    assert checkpoint._writer.start().pid != pid
    checkpoint.flush()
    assert torch.load(path).eq(2).all()


def _rank_saves(path: str) -> None:
    checkpoint._LEAST_BYTES = 0
    rank = ddpshim.world().rank
    checkpoint.save_in_background(torch.full((1000,), float(rank)), path)
    assert checkpoint._writer.is_busy() == (rank == 0)
    if rank == 0:
        _fill_the_disk()
        checkpoint.save_in_background(torch.ones(1000), path)
    ddpshim.cleanup()


@pytest.mark.ranks
def test_the_main_rank_saves_and_cleanup_raises_what_it_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2 failed first:(?s:.*)CheckpointError: .*could not be written"):
        run_ranks(_rank_saves, 2, str(tmp_path / "a.pth"))
    assert torch.load(tmp_path / "a.pth").eq(0).all()
    assert os.listdir(tmp_path) == ["a.pth"]
