"""Ranks that wait for one that does not come: how long they may, who is named, and whether the job ends."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from traceback import FrameSummary
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist

import ddpshim
from ddpshim.failures import failure, failure_notes, hang_detector
from ddpshim.failures.hang_detector import Standing, Waits, Watch, describe, judge, place_of, stack_of
from ddpshim.job.world import World
from ddpshim.model import guard
from ddpshim.process.job import Job, current
from ddpshim.process.observed import Progress
from tests.preloaded_commands import patience
from tests.ranks import run_ranks

TIMEOUT_S = 1800.0
OURS, TORCH = Path(ddpshim.__path__[0]), Path(torch.__path__[0])


def _hang(waits: Waits, now: float, site: str = "train.py:40") -> float:
    """Seconds until a rank that waits from `now` on, and is looked at every second, has waited for too long."""
    waited = 0
    while not waits.look(now + waited, ("hang", now), site):
        waited += 1
    return float(waited)


def test_a_day_with_stalls_of_15_s_gives_no_alarm_and_a_hang_after_it_is_noticed_within_a_minute() -> None:
    draw, waits, now, num_stalls = random.Random(0), Waits(TIMEOUT_S), 0, 0
    while now < 86400:
        stall = draw.choice((0, 0, 0, 0, 0, 0, 3, 15))
        num_stalls += stall == 15
        for second in range(stall + 1):
            assert not waits.look(now + second, ("waits since", now), "train.py:40")
        now += stall + 1
        assert not waits.look(now, ("computes since", now), None)
        now += draw.choice((1, 30))
    assert num_stalls > 300
    assert hang_detector.FLOOR_S < _hang(waits, now) < 50


def test_how_long_a_rank_may_wait() -> None:
    waits = Waits(TIMEOUT_S)
    assert waits.deadline_s("a") == 30
    for moment in range(41):  # the main rank evaluates
        assert waits.look(moment, "evaluation", "a") == (moment > 30)
    waits.look(41, "next", None)
    assert (waits.deadline_s("a"), waits.deadline_s("b")) == (3 * 41, 30)
    assert Waits(10).deadline_s("a") == 5  # before torch ends the collective
    waits.postpone()
    assert waits.deadline_s("b") == 60
    waits.look(42, "moved", "b")
    assert waits.deadline_s("b") == 30
    assert not waits.look(3600, "moved", "b"), "it was stopped meanwhile, as its last look says"
    assert waits.waited_s == 0


def _at(waits_in: Optional[str], **more: Any) -> Standing:
    return Standing(5, (0, 5), waits_in, None, "train.py:40", [f"  in {waits_in}"], 31)._replace(**more)


PASS, WORLD = "backward pass 6", "World.barrier (collective 5 of World's)"
HERE = _at(PASS)
CASES: list[tuple[str, Standing, Optional[Standing], Optional[list[int]], bool]] = [
    ("works or sleeps", HERE, _at(None), [1], False),
    ("is on work for itself", HERE, _at(None, section="a save"), None, False),
    ("is on it for long", HERE._replace(still_s=700), _at(None, section="a save"), [1], False),
    ("waits elsewhere", HERE, _at(WORLD, num_passes=4), [1], True),
    ("waits elsewhere, since a moment ago", HERE, _at(WORLD, num_passes=4, still_s=4), [1], False),
    ("has left", _at(WORLD), _at(None, has_left=True), [1], True),
    ("waits as well", HERE, HERE, [], False),
    ("gives no answer", HERE, None, [1], False),
]


@pytest.mark.parametrize(("what", "mine", "theirs", "named", "ends"), CASES, ids=[case[0] for case in CASES])
def test_who_is_named_and_whether_the_job_ends(
    what: str, mine: Standing, theirs: Optional[Standing], named: Optional[list[int]], ends: bool
) -> None:
    found = judge({0: mine, 1: theirs}, 0)
    assert (found and (found.named, found.ends_job)) == (None if named is None else (named, ends))


def test_what_is_said_of_many_ranks() -> None:
    standings: dict[int, Optional[Standing]] = dict.fromkeys(range(4), HERE)
    standings[2] = _at(None, batch=None, still_s=0, lines=['  File "train.py", line 3, in f'])
    assert judge(standings, 0).text.splitlines() == [
        "rank 0 has waited 31 s in backward pass 6 (train.py:40) for rank 2. Where each rank is:",
        "  ranks 0, 1, 3: 5 backward passes, batch 5 of epoch 0; waits in backward pass 6 (train.py:40), for 31 s",
        "  rank 2: 5 backward passes; is in its own code (train.py:40), and moves",
        '      File "train.py", line 3, in f',
    ]
    gone = describe({0: None, 1: _at(None, has_left=True, num_passes=1)}, [])
    assert "rank 0: gave no answer" in gone
    assert "rank 1: 1 backward pass, batch 5 of epoch 0; has left the job (train.py:40)" in gone


BACKWARD = FrameSummary(str(TORCH / "autograd" / "graph.py"), 9, "_engine_run_backward")
TRAIN = FrameSummary(os.path.join(os.sep, "project", "torch", "train.py"), 40, "main")
GATHER = FrameSummary(str(OURS / "job" / "collectives.py"), 7, "gather")
C10D = FrameSummary(str(TORCH / "distributed" / "distributed_c10d.py"), 3, "all_gather_object")
MAINS = FrameSummary(str(OURS / "job" / "collectives.py"), 8, "run_on_main")


@pytest.mark.parametrize(
    ("stack", "waits_in", "section"),
    [
        ([TRAIN, BACKWARD], PASS, None),
        ([TRAIN], None, None),
        ([TRAIN, C10D], "torch.distributed.all_gather_object", None),
        ([TRAIN, MAINS, GATHER, C10D], "World.run_on_main (collective 0 of World's)", None),
        ([TRAIN, MAINS, TRAIN], None, "World.run_on_main"),
        ([TRAIN, FrameSummary(str(OURS / "model" / "guard.py"), 5, "_compare")], "the comparison of weights", None),
        ([TRAIN, FrameSummary(str(OURS / "job" / "collectives.py"), 5, "wait")], "a message to all ranks", None),
        ([TRAIN, FrameSummary(str(OURS / "checkpoint" / "files.py"), 5, "wait")], None, "a save"),
    ],
)
def test_what_a_stack_says(stack: list[FrameSummary], waits_in: Optional[str], section: Optional[str]) -> None:
    done = Progress()
    done.num_passes, done.is_reducing = 5, True
    place = place_of([FrameSummary("<frozen runpy>", 1, "run"), *stack], done)
    assert (place.waits_in, place.section) == (waits_in, section)
    assert place.site == f"{TRAIN.filename}:40"
    assert place_of([TRAIN], done, waits_on_gpu=True).waits_in == "backward pass 5"


def test_a_thread_that_is_looked_at_ends_its_variables_itself() -> None:
    """Not the thread that looks: a scripted function crashed so (torch 2.1, 2.8), and a context of OpenGL may."""
    ended_in, seen, is_done, ident = set[int](), list[list[FrameSummary]](), threading.Event(), threading.get_ident()

    class Affine:
        def __del__(self) -> None:
            ended_in.add(threading.get_ident())

    def looks() -> None:
        while not is_done.is_set():
            seen.append(stack_of(ident))

    code = compile("def works(made):\n  held = made()\n  return sum(range(3000))\n", "/t/überfein.py", "exec")
    exec(code, found := dict[str, Any]())
    looking, end = threading.Thread(target=looks), time.monotonic() + 1
    looking.start()
    while time.monotonic() < end or len(seen) < 50:
        found["works"](Affine)
    is_done.set()
    looking.join()
    assert ended_in == {ident}
    assert ("/t/überfein.py", 3, "works") in {(one.filename, one.lineno, one.name) for one in (s[-1] for s in seen)}
    assert {s[-2].name for s in seen if s[-1].name == "works"} == {
        "test_a_thread_that_is_looked_at_ends_its_variables_itself"
    }


def test_each_function_that_waits_exists() -> None:
    for file, function in hang_detector._WAITS:
        assert f"def {function}(" in (OURS.parent / file).read_text(), (file, function)


def _watch() -> Watch:
    watched = current().watched
    assert watched is not None
    assert isinstance(watched.watch, Watch)
    return watched.watch


def _stay_away() -> list[str]:
    """What is said where rank 1 sleeps while rank 0 waits for its gradients."""
    here, said, is_said = ddpshim.world(), list[str](), threading.Event()

    def say(text: str, directly: bool) -> None:
        said.append(text)
        is_said.set()

    hang_detector.say = say  # type: ignore[assignment]
    net = ddpshim.wrap_parallel(torch.nn.Linear(2, 1))
    net(torch.ones(1, 2)).sum().backward()
    hang_detector.FLOOR_S, hang_detector._LOOK_EVERY_S = 0.2, 0.05
    _watch()._every_s = 0.05
    if here.rank == 1:
        is_said.wait(patience(20))
    net(torch.ones(1, 2)).sum().backward()
    assert is_said.wait(patience(20))
    return said


@pytest.mark.ranks
def test_a_rank_that_stays_away_is_named_on_all_ranks_with_its_stack() -> None:
    for said in run_ranks(_stay_away, 2):
        assert "in backward pass 2 (tests/failures/test_hangs.py" in said[0]
        assert " for rank 1. Where each rank is:" in said[0]
        assert "is_said.wait(patience(20))" in said[0]


def _wait_apart(folder: Path) -> None:
    def abort(error: BaseException) -> None:
        (folder / f"rank_{ddpshim.world().rank}").write_text(str(error))
        while len([*folder.iterdir()]) < 2:
            time.sleep(0.01)
        os._exit(1)

    failure.abort = abort  # type: ignore[assignment]
    hang_detector.FLOOR_S, hang_detector._LOOK_EVERY_S = 0.2, 0.05
    hang_detector._ANSWER_S, hang_detector.DEADLOCK_S = 1.0, 0.1
    _watch()._every_s = 0.05
    net = ddpshim.wrap_parallel(torch.nn.Linear(2, 1))
    net(torch.ones(1, 2)).sum().backward()
    if ddpshim.world().rank == 1:
        ddpshim.world().barrier()
    net(torch.ones(1, 2)).sum().backward()


@pytest.mark.ranks
def test_ranks_that_wait_in_different_places_end_the_job(tmp_path: Path) -> None:
    with pytest.raises(ddpshim.RankError):
        run_ranks(_wait_apart, 2, tmp_path)
    for rank in range(2):
        said = (tmp_path / f"rank_{rank}").read_text()
        assert "while others wait elsewhere: ranks would hang until a timeout. " in said
        assert "waits in World.barrier (collective " in said


def _leave_early() -> Optional[str]:
    net = ddpshim.wrap_parallel(torch.nn.Linear(2, 1))
    net(torch.ones(1, 2)).sum().backward()
    if ddpshim.world().rank == 1:
        guard.DEADLINE_S = 0.1  # else it waits for rank 0, to compare the last weights
        return None
    while not (left := _watch().describe_left()):
        time.sleep(0.01)
    lost = failure_notes._explained(RuntimeError("Connection closed by peer"))
    assert isinstance(lost, ddpshim.errors.SyncError)
    assert left in str(lost)
    return left


@pytest.mark.ranks
def test_a_rank_that_left_early_is_named_by_those_that_lost_it() -> None:
    left = run_ranks(_leave_early, 2)[0]
    assert left.splitlines()[0] == "  rank 0: 1 backward pass so far"
    assert left.splitlines()[1].startswith("  rank 1: 1 backward pass; has left the job (tests/ranks.py:")


@pytest.mark.parametrize(
    ("waited_s", "failed", "said"),
    [
        (99.0, None, None),
        (99.0, 0, None),  # by itself
        (5.0, 2, "SyncError: its GPU waits for messages of rank 2"),
        (101.0, None, "TimeoutError: Timed out waiting 100 s for other ranks (timeout_s)"),
    ],
)
def test_where_nccl_gives_no_error_a_rank_that_waits_in_vain_ends(
    waited_s: float, failed: Optional[int], said: Optional[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr(failure, "abort", ended.append)
    monkeypatch.setattr(hang_detector, "first_failure", lambda: failed)
    for is_on_gpu, gets_no_errors, site in ((False, True, "a.py:3"), (True, False, "a.py:3"), (True, True, "a.py:3")):
        job = Job()
        job.store = dist.HashStore()
        watched = Watch(job, World(world_size=2, backend="nccl" if gets_no_errors else "gloo"), 100.0)
        watched._is_on_gpu = is_on_gpu
        watched._waits.look(0.0, "state", site)
        watched._waits._last_look = watched._waits._since + waited_s
        monkeypatch.setattr(watched, "_see", lambda: False)
        watched._look()
        assert not ended or (is_on_gpu and gets_no_errors)
    assert [f"{type(error).__name__}: {error}" for error in ended] == ([] if said is None else [said])
    if ended:
        is_late = failure_notes.meaning_of(str(ended[0])) == "late"
        assert (is_late, ended[0].__dict__.get("first_failure")) == (failed is None, failed)
