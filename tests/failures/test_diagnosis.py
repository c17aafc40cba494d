"""Why a run is not faster: phases of a step, what is slow in them, and the line about it (see evidence/slowness.py)."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ddpshim
from ddpshim.job import meter, slow_step_report
from ddpshim.job.meter import PHASES, Clock, Meter
from ddpshim.job.slow_step_report import Pace
from ddpshim.job.slowness import Finding, judge
from ddpshim.process import events, machine, remedies, timing
from ddpshim.process.job import current
from ddpshim.process.say import say
from evidence import slowness
from tests.ranks import run_ranks


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the clock of the phases says; it only moves when it is told to: `time.now += 1`."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


class _Linear(nn.Linear):
    """Takes 2 s of `time` to compute its output, by whichever method."""

    time: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.time.now += 2
        return super().forward(x)

    def forward_train(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def _train(time: Any, counted: Meter, by: str, num_steps: int = 4, data_s: float = 0.5) -> dict[str, float]:
    """Steps with a known time in each phase; what the clock counted."""
    net = _Linear(2, 1)
    net.time = time
    policy: Any = ddpshim.wrap_parallel(net)
    call = {"wrapper": policy, "method": lambda x: policy.forward_train(x), "module": net}[by]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: _pass(time, 32))
    clock = counted.start()
    for x in DataLoader(slowness.Samples(lambda: _pass(time, data_s), num_steps)):
        time.now += 1
        loss = call(x).sum()
        with timing.counted("backward"):
            time.now += 4
            loss.backward()
            with timing.counted("communication"):
                time.now += 8
        time.now += 16
        optimizer.step()
        with timing.counted("save"):
            time.now += 64
    time.now += 128
    counted.stop()
    return clock.seconds


def _pass(time: Any, seconds: float) -> None:
    time.now += seconds


@pytest.mark.parametrize("by", ["wrapper", "method", "module"])
def test_each_moment_of_a_step_belongs_to_one_phase(time: Any, by: str) -> None:
    seconds = _train(time, Meter(), by)
    assert list(seconds) == list(PHASES)
    # A module that is called past its wrapper is not seen: what came before it counts to it.
    transfer, forward = (0.0, 12.0) if by == "module" else (4.0, 8.0)
    rest = {"data": 2.0, "backward": 16.0, "communication": 32.0, "after": 64.0, "optimizer": 128.0, "save": 256.0}
    rest |= {"rollout": 0.0, "evaluation": 0.0, "outside": 128.0}
    assert seconds == {"transfer": transfer, "forward": forward, **rest}


def test_what_trains_nothing_is_no_step(time: Any) -> None:
    counted, borders = Meter(), list[float]()
    clock = counted.start()
    clock.at_border = lambda: borders.append(time.now)
    samples = slowness.Samples(lambda: _pass(time, 1.0), 4)
    with torch.no_grad():
        for _ in DataLoader(samples):
            time.now += 8
    with timing.counted("rollout"):
        list(DataLoader(samples))
    thread = threading.Thread(target=lambda: list(DataLoader(samples)))
    thread.start()
    thread.join()
    counted.stop()
    assert borders == []
    assert (clock.seconds["evaluation"], clock.seconds["data"], clock.seconds["rollout"]) == (32.0, 4.0, 4.0)
    assert clock.seconds["outside"] == 4.0, "the thread's"


def test_a_training_without_a_loader_has_steps(time: Any) -> None:
    counted, borders = Meter(), list[float]()
    clock = counted.start()
    clock.at_border = lambda: borders.append(time.now)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for _ in range(12):
        time.now += 1
        optimizer.step()
    counted.stop()
    assert borders == [109.0, 110.0, 111.0, 112.0]


# The judge

USUAL = {"data": 1.0, "transfer": 2.0, "forward": 30.0, "backward": 60.0, "optimizer": 5.0, "after": 2.0}


def _ranks(num_ranks: int, *more: tuple[Sequence[int], str, Sequence[float]], wait: float = 1.0) -> Any:
    """Blocks of ranks in a healthy run, with `more` (whose, in which phase, how many ms in each block); others wait."""
    num_blocks = 16
    own = [[dict.fromkeys(PHASES, 0.0) | USUAL for _ in range(num_blocks)] for _ in range(num_ranks)]
    for ranks, phase, added in more:
        for rank in ranks:
            for number in range(num_blocks):
                own[rank][number][phase] += added[number % len(added)]
                own[rank][number]["forward"] += 0.3 * ((number * (rank + 3)) % 5)  # what is never equal
    for number in range(num_blocks):
        slowest = max(sum(rank[number].values()) for rank in own)
        for rank in own:
            rank[number]["communication"] += wait + slowest - sum(rank[number].values())
    return [{number + 4: [1e-3 * s for s in block.values()] for number, block in enumerate(rank)} for rank in own]


def _judge(ranks: Any, *loads_s: float) -> Any:
    return judge(ranks, loads_s or [None] * len(ranks))


def _place(finding: Any) -> Any:
    return finding and (finding.phase, finding.ranks, round(100 * finding.share))


EVERY_10, STALLS = [0.0] * 7 + [80.0], [0.0, 0.0, 0.0, 60.0]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], None),
        ([([2], "data", [8.0])], ("data", (2,), 7)),
        ([([2], "data", STALLS)], ("data", (2,), 13)),
        ([([1], "transfer", [5.0])], ("transfer", (1,), 5)),
        ([([3], "forward", [20.0])], ("forward", (3,), 17)),
        ([([0], "backward", [5.0])], ("backward", (0,), 5)),
        ([([0], "optimizer", [10.0])], ("optimizer", (0,), 9)),
        ([([0], "save", EVERY_10)], ("save", (0,), 9)),
        ([([1], "rollout", EVERY_10)], ("rollout", (1,), 9)),
        ([([0], "outside", [4.0]), ([0], "after", [4.0])], ("other", (0,), 7)),
        ([([2, 3], "forward", [20.0])], ("forward", (2, 3), 17)),
        ([(range(4), "data", [25.0])], ("data", (), 20)),
        ([(range(4), "communication", [10.0])], ("communication", (), 10)),
        ([(range(4), "rollout", EVERY_10)], ("rollout", (), 9)),
        ([(range(4), "forward", [50.0])], None),  # the same on all: their compute
        ([([1], "forward", [0.0] * 15 + [80.0])], None),  # one step that the system has interrupted
        ([([1], "forward", [2.0])], None),  # less than is worth a line
        ([([1], "forward", [10.0]), ([1], "backward", [-10.0])], None),  # at the border of two phases
        ([([1], "forward", [10.0]), (range(4), "data", [25.0])], ("data", (), 19)),  # what costs most
    ],
)
def test_what_is_slow_has_a_rank_and_a_phase(more: Any, expected: Any) -> None:
    assert _place(_judge(_ranks(4, *more))) == expected


def test_other_numbers_of_ranks() -> None:
    assert _place(_judge(_ranks(2, ([1], "optimizer", [10.0])))) == ("optimizer", (1,), 9)
    assert _place(_judge(_ranks(1, ([0], "data", [50.0])))) == ("data", (), 34)
    assert _judge(_ranks(1)) is None
    short = [dict(list(blocks.items())[:3]) for blocks in _ranks(4, ([1], "forward", [50.0]))]
    assert _judge(short) is None, "three blocks say nothing"


def test_loaders_that_are_equally_slow_are_no_fault_of_the_rank_that_waits() -> None:
    ranks = _ranks(4, ([2], "data", [30.0]))  # the others' workers go on while these wait for rank 2
    assert _place(_judge(ranks, 0.13, 0.12, 0.13, 0.13)) == ("data", (), 23)
    assert _place(_judge(ranks, 0.05, 0.05, 0.13, 0.05)) == ("data", (2,), 23)


@pytest.mark.parametrize(
    ("finding", "said"),
    [
        (
            Finding("data", (), 0.02, 0.1),
            "every rank spends 20% of each step (20 of 100 ms) waiting for data. Increase",
        ),
        (Finding("data", (), 0.02, 0.1, has_room=False), "nor more num_workers, which would compete for the cores."),
        (Finding("data", (1,), 0.02, 0.1), "more num_workers"),
        (Finding("data", (1,), 0.02, 0.1, has_room=False), "and what else uses the cores there."),
        (
            Finding("communication", (), 0.02, 0.1),
            "gradient buckets of another size (wrap_parallel(...,",
        ),
        (Finding("save", (0,), 0.0123, 0.1), "which wait: 12% of each step (12.3 of 100 ms). Save less often"),
        (Finding("forward", (2, 3), 0.02, 0.1), "ranks 2, 3 are longer in the forward pass"),
    ],
)
def test_the_line_says_what_it_costs_and_what_to_do(finding: Finding, said: str) -> None:
    assert said in str(finding)


def test_a_line_begins_below_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {"a bar"}
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=SimpleNamespace(_instances=shown)))
    say("slow")
    shown.clear()
    say("fast")
    assert capsys.readouterr().err == "\nddpshim: slow\nddpshim: fast\n"


# What a rank counts, and tells


@pytest.fixture
def notes() -> Any:
    made = slowness.Notes(("slow",))
    events.record_to(made)
    yield made.found
    events.record_to(None)


@pytest.mark.parametrize(
    ("num_ranks", "own_cores", "num_cores", "num_workers", "expected"),
    [(2, 2, 2, 0, False), (2, 8, 8, 2, True), (2, 8, 8, 3, False), (2, 8, 16, 6, True), (2, 8, 16, 7, False)],
)
def test_more_workers_are_advised_where_there_are_cores(
    num_ranks: int, own_cores: int, num_cores: int, num_workers: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two: each rank is bound to half of the machine's cores."""
    monkeypatch.setattr(slow_step_report, "world", lambda: SimpleNamespace(local_world_size=num_ranks))
    monkeypatch.setattr(slow_step_report.os, "cpu_count", lambda: num_cores)
    monkeypatch.setattr(machine, "cores", lambda: frozenset(range(own_cores)))
    monkeypatch.setattr(machine, "core_quota", lambda: None)
    kept = Pace()
    kept._clock = SimpleNamespace(num_workers=num_workers)  # type: ignore[assignment]
    assert kept._has_room() == expected


@pytest.mark.parametrize("data_s", [0.5, 50.0])
def test_a_line_after_twenty_steps_where_there_is_something_to_say(
    time: Any, notes: Any, data_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Pace()
    kept.begin()
    _train(time, Meter(), "wrapper", 43, data_s)
    ddpshim.cleanup()
    kept._end()
    said = [line for line in capsys.readouterr().err.splitlines() if "steps" in line]
    assert [(note["phase"], note["steps"]) for note in notes] == [("save", slow_step_report.FIRST_LOOK)], (
        "it is said once"
    )
    assert said == [f"ddpshim: after 20 steps: {notes[0]['said']} (DDPSHIM_DIAGNOSE=no turns this off)"]
    assert timing.running is None


def _looks(kept: Pace) -> list[tuple[int, dict[int, list[float]]]]:
    """The steps at which `kept` has looked, and what it found; it tells nothing."""
    made = list[tuple[int, dict[int, list[float]]]]()
    kept._tell = lambda ranks, loads_s, num_steps: made.append((kept.num_steps, ranks[0]))  # type: ignore[method-assign]
    return made


class _Mark:
    """An event of a GPU that is ten times as fast as the host, and late by a second."""

    def __init__(self, time: Any) -> None:
        self.time, self.at = time, time.now

    def query(self) -> bool:
        return bool(self.time.now > self.at + 1)

    def elapsed_time(self, end: _Mark) -> float:
        return 100 * (end.at - self.at)


def test_on_a_gpu_its_own_times_count_and_nothing_waits(time: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    num_marks = []
    for module in (meter, slow_step_report):
        monkeypatch.setattr(module, "mark", lambda: (num_marks.append(1), _Mark(time))[1])
    kept = Pace()
    looks = _looks(kept)
    kept.begin()
    kept._on_gpu = True
    _train(time, Meter(), "wrapper", 23)
    kept._end()
    ((_, blocks),) = looks
    for block in blocks.values():
        seconds = dict(zip(PHASES, block))
        assert (seconds["forward"], seconds["backward"], seconds["optimizer"]) == pytest.approx((0.2, 0.4, 3.2))
        assert seconds["save"] == 64.0, "the host's: rare, so not in the steps that are marked"
    assert len(num_marks) == pytest.approx(23 / 3 * 13, abs=26), "every third step"


def test_later_looks_are_at_twice_as_many_steps(time: Any) -> None:
    kept = Pace()
    looks = _looks(kept)
    kept.begin()
    _train(time, Meter(), "wrapper", 90)
    kept._end()
    assert [steps for steps, _ in looks] == [20, 40, 80]
    assert [sorted(blocks) for _, blocks in looks] == [list(range(4, 21)), list(range(21, 41)), list(range(42, 81, 2))]
    seconds = {"data": 0.5, "transfer": 1, "forward": 2, "backward": 4, "communication": 8, "after": 16}
    seconds |= {"optimizer": 32, "save": 64, "rollout": 0, "evaluation": 0, "outside": 0}
    assert {tuple(block) for _, blocks in looks for block in blocks.values()} == {tuple(seconds[p] for p in PHASES)}


@pytest.mark.ranks
def test_four_ranks_say_which_of_them_is_slow() -> None:
    found = slowness.look(
        slowness.Case("backward", 2.0, 2, step_s=0.05)
    )  # so much that a busy machine hides none of it
    assert found is not None
    assert (found["phase"], tuple(found["ranks"])) == ("backward", (2,))
    assert 0.2 < found["share"] < 0.8, "two thirds, where nothing else runs"


def _is_counted() -> tuple[bool, bool]:
    ddpshim.wrap_parallel(nn.Linear(2, 1))
    inside = isinstance(timing.running, Clock)
    ddpshim.cleanup()
    return inside, timing.running is not None


@pytest.mark.ranks
@pytest.mark.parametrize("choice", ["yes", "no"])
def test_the_option_turns_it_off(choice: str) -> None:
    assert run_ranks(_is_counted, 2, environ={"DDPSHIM_DIAGNOSE": choice}) == [(choice == "yes", False)] * 2


def test_advice_is_of_the_mode_and_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    apis = re.compile(r"\bmake_loader|wrap_parallel|\bWorld\b|\bworld\b|\bsetup\(|save_in_background")
    assert [name for name, (_, whole) in remedies.REMEDIES.items() if apis.search(whole)] == []
    for is_whole, more in (
        (False, ", or gradient buckets of another size (wrap_parallel(..., bucket_cap_mb=...))"),
        (True, ""),
    ):
        monkeypatch.setattr(current(), "holds_whole_batches", is_whole)
        said = str(Finding("communication", (), 0.1, 0.2))
        assert said.endswith(f"fewer ranks{more}.")
    for ranks, phase in (((), "transfer"), ((1,), "transfer"), ((1,), "forward"), ((), "data")):
        on_gpu, on_cpu = (str(Finding(phase, ranks, 0.1, 0.2, is_on_gpu=is_on)) for is_on in (True, False))
        assert re.search("pin_memory|nvidia-smi|GPU", on_gpu)
        assert not re.search("pin_memory|nvidia-smi|GPU", on_cpu)
