"""The three times of a step: each moment counted to one of them, exactly; and the one line about waiting for data."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ddpshim
from ddpshim.errors import RankError
from ddpshim.observe import step_times
from ddpshim.observe.step_times import Counted, StepTimes
from ddpshim.process import machine, observed
from ddpshim.process.job import current
from tests.ranks import run_ranks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that only moves when it is told to: `clock.now += 1`."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(observed, "time", SimpleNamespace(perf_counter=lambda: made.now))
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


def _optimizer(clock: Any) -> _SGD:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from here on torch calls hooks twice in a step of _SGD
    made = _SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    made.clock = clock
    return made


def test_each_moment_counts_to_one_part_and_what_is_no_step_to_none(clock: Any) -> None:
    times, optimizer = current().part(StepTimes), _optimizer(clock)
    begun = times.read(leaves_step=True)
    clock.now += 100
    for _ in DataLoader(_Samples(clock, 1.0)):
        clock.now += 0.5
        optimizer.step()
        with observed.outside_steps():
            clock.now += 100
            with observed.outside_steps():  # an evaluation saves
                clock.now += 100
        clock.now += 0.25
        with torch.no_grad():  # an evaluation inside of a step, whose own loader counts as compute
            for _ in DataLoader(_Samples(clock, 0.0625)):
                pass
    clock.now += 100
    with torch.no_grad():
        for _ in DataLoader(_Samples(clock, 1.0)):
            clock.now += 1
    found = times.read().since(begun)
    assert found == Counted(4, {"data_wait": 4.0, "compute": 4.0, "optimizer": 0.5})


def test_steps_without_a_loader_end_with_the_optimizer(clock: Any) -> None:
    times, optimizer = current().part(StepTimes), _optimizer(clock)
    for _ in range(3):
        clock.now += 2
        optimizer.step()
    assert times.read() == Counted(3, {"data_wait": 0.0, "compute": 4.0, "optimizer": 0.375}), "not before the first"


def test_a_loader_that_reads_another_waits_once(clock: Any) -> None:
    class Outer(Dataset[Any]):
        def __init__(self) -> None:
            self.inner = iter(DataLoader(_Samples(clock, 1.0)))

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return next(self.inner)

    times = current().part(StepTimes)
    for _ in DataLoader(Outer()):
        clock.now += 0.5
    assert times.read() == Counted(3, {"data_wait": 3.0, "compute": 1.5, "optimizer": 0.0})


HINT = "of a step of 1000 ms, rank 0 waited 200 ms for data. "
RAISE = f"{HINT}Raise num_workers (now 1; robomimic: train.num_data_workers), as there are cores left."
STORE = f"{HINT}Store samples decoded and small, or keep them in memory."


@pytest.mark.parametrize(
    ("steps", "wait", "num_workers", "is_stream", "ranks", "expected"),
    [
        (100, 0.2, 1, False, 2, RAISE),
        (100, 0.2, 1, False, 3, STORE),  # 9 processes on 8 cores
        (100, 0.2, 1, True, 2, STORE),  # more workers would repeat what an iterable dataset yields
        (100, 0.14, 1, False, 2, ""),
        (99, 0.2, 1, False, 2, ""),
    ],
)
def test_one_line_where_data_is_waited_for(
    steps: int, wait: float, num_workers: int, is_stream: bool, ranks: int, expected: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(step_times.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    monkeypatch.setattr(machine, "cores", lambda: frozenset(range(8)))
    counted = Counted(steps, {"data_wait": steps * wait, "compute": steps * (1 - wait), "optimizer": 0.0})
    times: Any = SimpleNamespace(read=lambda: counted, num_workers=num_workers, is_stream=is_stream)
    assert step_times.hint(times, ddpshim.World(local_world_size=ranks)) == expected


def _hinted(folder: str) -> list[str]:
    step_times._LEAST_S, step_times._LEAST_STEPS = 0.0, 4
    clock, said = SimpleNamespace(now=0.0), io.StringIO()
    observed.time = SimpleNamespace(perf_counter=lambda: clock.now)  # type: ignore[assignment]
    with contextlib.redirect_stderr(said):
        with ddpshim.record(folder):
            for _ in DataLoader(_Samples(clock, 1.0)):
                clock.now += 1
        assert said.getvalue() == ""
        ddpshim.cleanup()
    return re.findall("rank . waited .* ms for data", said.getvalue())


@pytest.mark.ranks
def test_the_line_is_said_once_by_the_main_rank_at_the_end(tmp_path: Path) -> None:
    assert run_ranks(_hinted, 2, str(tmp_path)) == [["rank 0 waited 1e+03 ms for data"], []]


def test_the_profile_of_one_process(clock: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "resident_bytes", lambda: (1_500_000_000, 2_500_000_000))
    with ddpshim.profile() as ranks:
        for _ in DataLoader(_Samples(clock, 0.25)):
            clock.now += 0.75
    memory = {"rss": 1_500_000_000, "peak_rss": 2_500_000_000}
    assert ranks == [{"steps": 4, "seconds": {"data_wait": 1.0, "compute": 3.0, "optimizer": 0.0}, "memory": memory}]
    said, titles, _, row = capsys.readouterr().err.splitlines()
    assert said == "ddpshim: where the time of each rank's steps went"
    assert " ".join(titles.split()) == "| rank | steps | ms a step | data wait | compute | optimizer | memory, most |"
    assert " ".join(row.split()) == "| 0 | 4 | 1000.00 | 25% | 75% | 0% | 2.5 GB |"
    with pytest.raises(KeyError), ddpshim.profile() as ranks:
        raise KeyError
    assert ranks == [], "a run that failed was summed up: its peers may be anywhere"
    with ddpshim.profile() as ranks:
        pass
    assert ranks[0]["steps"] == 0


def _failing() -> None:
    with ddpshim.profile():
        if ddpshim.world().rank == 1:
            raise ValueError("on purpose")


@pytest.mark.ranks
def test_a_rank_that_fails_is_not_kept_from_it() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed first:\n(.|\n)*ValueError: on purpose"):
        run_ranks(_failing, 2)
