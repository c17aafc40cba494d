"""The three times of a step: each moment counted to one of them, exactly; and the one line about waiting for data."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ddpshim
from ddpshim import variables
from ddpshim.observe.step_times import StepTimes
from ddpshim.process import machine, observed
from ddpshim.process.job import current
from ddpshim.trainers.unedited import joining
from tests.preloaded import environment, start_afresh


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
    optimizer.step()  # after the last batch
    clock.now += 100
    with torch.no_grad():
        for _ in DataLoader(_Samples(clock, 1.0)):
            clock.now += 1
    found = times.read(since=begun)
    assert found == {"steps": 4, "seconds": {"data_wait": 4.0, "message_wait": 0.0, "compute": 4.0, "optimizer": 0.5}}


def test_steps_without_a_loader_end_with_the_optimizer(clock: Any) -> None:
    times, optimizer = current().part(StepTimes), _optimizer(clock)
    for _ in range(3):
        clock.now += 2
        optimizer.step()
    assert times.read() == {
        "steps": 3,
        "seconds": {"data_wait": 0.0, "message_wait": 0.0, "compute": 4.0, "optimizer": 0.375},
    }, "not before the first"


def test_a_loader_that_reads_another_waits_once(clock: Any) -> None:
    times, inner = current().part(StepTimes), iter(DataLoader(_Samples(clock, 1.0)))
    for _ in DataLoader(range(3), collate_fn=lambda _: next(inner)):  # type: ignore[arg-type]
        clock.now += 0.5
    assert times.read() == {
        "steps": 3,
        "seconds": {"data_wait": 3.0, "message_wait": 0.0, "compute": 1.5, "optimizer": 0.0},
    }


def test_the_profile_of_one_process(clock: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "resident_bytes", lambda: (1_500_000_000, 2_500_000_000))
    with ddpshim.profile() as ranks:
        for _ in DataLoader(_Samples(clock, 0.25)):
            clock.now += 0.75
    memory = {"rss": 1_500_000_000, "peak_rss": 2_500_000_000}
    assert ranks == [
        {
            "steps": 4,
            "seconds": {"data_wait": 1.0, "message_wait": 0.0, "compute": 3.0, "optimizer": 0.0},
            "memory": memory,
        }
    ]
    said, titles, _, row = capsys.readouterr().err.splitlines()
    assert said == "ddpshim: where the time of each rank's steps went"
    assert " ".join(titles.split()) == "| rank | steps | ms a step | data wait | compute | memory, most |"
    assert " ".join(row.split()) == "| 0 | 4 | 1000.00 | 25% | 75% | 2.5 GB |"
    with pytest.raises(KeyError), ddpshim.profile() as ranks:
        raise KeyError
    assert ranks == [], "a run that failed was summed up: its peers may be anywhere"
    with ddpshim.profile() as ranks:
        pass
    assert ranks[0]["steps"] == 0


def test_a_message_is_waited_for_in_a_step_where_ranks_compute_alike(clock: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(current(), "door", joining.DOOR)
    times = current().part(StepTimes)
    for _ in DataLoader(_Samples(clock, 1.0)):
        for _ in range(2):
            with current().part(observed.Progress).waiting():
                clock.now += 0.25
        clock.now += 0.5
    with current().part(observed.Progress).waiting():  # after the last batch
        clock.now += 100
    seconds = {"data_wait": 4.0, "message_wait": 2.0, "compute": 2.0, "optimizer": 0.0}
    assert times.read() == {"steps": 4, "seconds": seconds}


SLOW = f"""
import torch, time
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return {8 * 120}
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.rand(4)

torch.manual_seed(0)
network = nn.Linear(4, 1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for x in DataLoader(Slow(), 8):
    network(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.launch
def test_run_says_where_the_time_went(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    environ = {**environment(), variables.ROWS: "all"}
    code, output = start_afresh(["-m", "ddpshim", "run", "--nproc", "2", "train.py"], environ, tmp_path, 120)
    assert code == 0, output[-6000:]
    said = re.search(r"a step took (.*) ms, (.*)% of it waiting for data, .*% for other ranks: (.*)", output)
    assert said is not None, output[-6000:]
    assert float(said[1]) > 16, "each rank loads 8 samples, for 2 ms each"
    assert float(said[2]) > 50
    workers = "more data workers than num_workers=0 may make it faster"
    sample = "DDPSHIM_DRAWS=sample lets each rank load its own samples only, with other random numbers"
    assert said[3] == (workers if machine.num_cores() > 2 else sample)
