"""The profile: each moment counted to one part, exactly; nothing in place while nobody asks."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import ddpshim
from ddpshim.errors import RankError
from ddpshim.job import meter
from ddpshim.job.meter import PARTS, Meter
from ddpshim.process import machine, timing
from tests.ranks import run_ranks

TORCHS_NEXT = _BaseDataLoaderIter.__next__


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that only moves when it is told to: `clock.now += 1`."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


class _Samples(Dataset[Any]):
    """Four samples, each of which takes `seconds` of `clock` to read."""

    def __init__(self, clock: Any, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.now += self.seconds
        return torch.ones(2)


class _SGD(torch.optim.SGD):
    """Takes 0.125 s of `clock` for a step."""

    clock: Any

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clock.now += 0.125
        super().step()


def _train(clock: Any, data_s: float = 1.0, compute_s: float = 0.5, counted: Any = None) -> Meter:
    """Four steps; one more second passes before them, and one after."""
    net = nn.Linear(2, 1)
    optimizer = _SGD(net.parameters(), lr=0.1)
    optimizer.clock = clock
    counted = counted or Meter()
    counted.start()
    clock.now += 1
    for x in DataLoader(_Samples(clock, data_s)):
        clock.now += compute_s
        net(x).sum().backward()
        optimizer.step()
    clock.now += 1
    counted.stop()
    clock.now += 1000
    return counted  # type: ignore[no-any-return]


def _seconds(**parts: float) -> dict[str, float]:
    return {**dict.fromkeys(PARTS, 0.0), **parts}


def test_each_moment_counts_to_one_part(clock: Any) -> None:
    counted = _train(clock)
    assert counted.num_batches == 4
    assert counted.seconds == _seconds(data_wait=4.0, compute=2.0, optimizer=0.5, other=2.0)


def test_a_slow_dataset_raises_data_wait_and_nothing_else(clock: Any) -> None:
    assert _train(clock, data_s=3.0).seconds == {**_train(clock).seconds, "data_wait": 12.0}


def test_slow_compute_raises_compute_and_nothing_else(clock: Any) -> None:
    assert _train(clock, compute_s=2.5).seconds == {**_train(clock).seconds, "compute": 10.0}


def test_a_meter_adds_up_over_several_blocks(clock: Any) -> None:
    counted = _train(clock)
    _train(clock, counted=counted)
    assert counted.seconds == _seconds(data_wait=8.0, compute=4.0, optimizer=1.0, other=4.0)
    assert counted.num_batches == 8


def test_a_part_may_interrupt_another(clock: Any) -> None:
    counted = Meter()
    counted.start()
    counted.begin("optimizer")
    clock.now += 1
    with timing.counted("communication"):
        clock.now += 2
        with timing.counted("communication"):  # two networks that finish in one backward pass
            clock.now += 4
        clock.now += 8
    clock.now += 16
    counted.end()
    counted.end()  # of a pass that began before the meter
    counted.stop()
    assert counted.seconds == _seconds(communication=14.0, optimizer=17.0)


def test_meters_inside_each_other_count_the_same(clock: Any) -> None:
    outer, inner = Meter(), Meter()
    outer.start()
    clock.now += 16
    inner.start()
    for _ in DataLoader(_Samples(clock, 1.0)):
        with timing.counted("communication"):
            clock.now += 2
        clock.now += 0.5
    inner.stop()
    with timing.counted("communication"):
        clock.now += 32
    outer.stop()
    assert inner.seconds == _seconds(data_wait=4.0, communication=8.0, compute=2.0)
    assert outer.seconds == _seconds(data_wait=4.0, communication=40.0, compute=2.0, other=16.0)
    assert outer.num_batches == inner.num_batches == 4
    assert _is_in_place() == (False,) * 4


@pytest.mark.ranks
def test_workers_are_waited_for() -> None:
    counted = Meter()
    counted.start()
    for _ in DataLoader(_Samples(SimpleNamespace(now=0), 0.0), num_workers=1):
        pass
    counted.stop()
    assert counted.num_batches == 4
    assert counted.seconds["data_wait"] > 0


def _is_in_place() -> tuple[bool, bool, bool, bool]:
    hooks = len(_global_optimizer_pre_hooks) > 0, len(_global_optimizer_post_hooks) > 0
    return timing.running is not None, _BaseDataLoaderIter.__next__ is not TORCHS_NEXT, *hooks


def test_nothing_is_in_place_unless_something_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert _is_in_place() == (False,) * 4
    with ddpshim.profile():
        assert _is_in_place() == (True,) * 4
    assert _is_in_place() == (False,) * 4
    capsys.readouterr()
    with pytest.raises(KeyError), ddpshim.profile() as ranks:
        raise KeyError
    assert _is_in_place() == (False,) * 4
    assert ranks == [], "a run that failed was summed up: its peers may be anywhere"
    assert capsys.readouterr().err == ""


def test_one_process_has_a_table_of_time_and_memory(
    clock: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "resident_bytes", lambda: (1_500_000_000, 2_500_000_000))
    with ddpshim.profile() as ranks:
        for _ in DataLoader(_Samples(clock, 0.25)):
            clock.now += 0.75
    memory = {"rss": 1_500_000_000, "peak_rss": 2_500_000_000}
    assert ranks == [{"steps": 4, "seconds": _seconds(data_wait=1.0, compute=3.0), "memory": memory}]
    said, titles, row = capsys.readouterr().err.splitlines()
    assert said == "ddpshim: where the time of each rank went"
    columns = "rank steps steps/s ms a step data wait compute optimizer communication other memory, most"
    assert " ".join(titles.split()) == columns
    assert " ".join(row.split()) == "0 4 1.0 1000.00 25% 75% 0.0% 0.0% 0.0% 2.5 GB"


def test_a_block_without_a_step_divides_by_nothing(clock: Any) -> None:
    with ddpshim.profile() as ranks:
        pass
    assert ranks[0]["steps"] == 0
    assert sum(ranks[0]["seconds"].values()) == 0.0


# Ranks

SLOW_S = 0.05
NUM_STEPS = 8


def _late(folder: str, step: int, is_slow: bool) -> None:
    """Let the slow rank be late: it sleeps from when the other one waits for it, however fast that is."""
    arrived = Path(folder, f"arrived_{step}")
    if not is_slow:
        arrived.touch()
        return
    while not arrived.exists():
        time.sleep(0.001)
    time.sleep(SLOW_S)


def _profiled(folder: str, slow_rank: int, guilty: str) -> dict[str, Any]:
    here = ddpshim.world()
    with ddpshim.shared_random_streams(0):
        nets = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))]
    one, two = (ddpshim.wrap_parallel(net) for net in nets)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.01)
    start = time.perf_counter()
    with ddpshim.profile() as ranks:
        for step, x in enumerate(ddpshim.make_loader(torch.randn(4 * NUM_STEPS, 4), batch_size=4)):
            if guilty == "compute":
                _late(folder, step, here.rank == slow_rank)
            optimizer.zero_grad()
            (one(x) + two(x)).square().mean().backward()
            optimizer.step()
            if guilty == "collective":
                _late(folder, step, here.rank == slow_rank)
                here.mean(1.0)
    return {"ranks": ranks, "around": time.perf_counter() - start, "reductions": one.num_reductions}


@pytest.mark.ranks
@pytest.mark.parametrize("guilty", ["compute", "collective"])
def test_a_slow_rank_makes_the_other_wait_in_communication(guilty: str, tmp_path: Path) -> None:
    found = run_ranks(_profiled, 2, str(tmp_path), 1, guilty)
    assert found[0]["ranks"] == found[1]["ranks"]
    assert found[0]["reductions"] == NUM_STEPS
    fast, slow = (row["seconds"] for row in found[0]["ranks"])
    slept = SLOW_S * NUM_STEPS
    assert fast["communication"] > slept / 2
    assert fast["communication"] > slow["communication"]
    assert slow["compute"] >= slept
    assert slow["compute"] > fast["compute"]
    for row, one in zip(found[0]["ranks"], found):
        assert row["steps"] == NUM_STEPS
        assert tuple(row["seconds"]) == PARTS
        assert sum(row["seconds"].values()) < one["around"]
        assert row["memory"]["peak_rss"] > 50e6


def _failing() -> None:
    with ddpshim.profile():
        if ddpshim.world().rank == 1:
            raise ValueError("on purpose")


@pytest.mark.ranks
def test_a_rank_that_fails_is_not_kept_from_it() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed first:\n(.|\n)*ValueError: on purpose"):
        run_ranks(_failing, 2)
