"""One clock for programs that do not know of ranks: what names a folder or decides is the main rank's on all ranks."""

from __future__ import annotations

import builtins
import contextlib
import datetime
import itertools
import mmap
import os
import pickle
import random
import secrets
import struct
import threading
import time
import uuid
from datetime import date
from datetime import datetime as imported_before
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

import ddpshim
from ddpshim.errors import WorldError
from ddpshim.job.world import World
from ddpshim.options import Options
from ddpshim.process.job import Job, current
from ddpshim.rows.tensor import Counts
from ddpshim.trainers.unedited import clock
from ddpshim.trainers.unedited.clock import Clock, Readings, shared_readings
from tests.ranks import run_ranks


def worlds(**options: Any) -> list[World]:
    store, made = dist.HashStore(), []
    for rank in range(2):
        job = Job()
        job.store = store
        made.append(World(rank=rank, world_size=2, options=Options(**options), _job=job))
    return made


def both_ways() -> list[list[Clock]]:
    """The clocks of two ranks that ask the store, and of two that share memory."""
    memory = mmap.mmap(-1, Readings.SIZE)
    return [[*map(Clock, worlds())], [Clock(world, Readings(memory)) for world in worlds()]]


def asked() -> list[Any]:
    found: list[Any] = []
    for _ in range(2):
        found += [time.time(), time.time_ns(), time.strftime("%H:%M:%S"), time.strftime("%Y", time.gmtime(0))]
        found += [tuple(time.localtime()), tuple(time.gmtime()), time.ctime(), time.asctime(), time.ctime(0)]
        found += [imported_before.now(), datetime.datetime.now(datetime.timezone.utc), imported_before.today()]
        found += [datetime.datetime.utcnow(), date.today(), datetime.date.today().isoformat()]
        found += [uuid.uuid4(), uuid.uuid1(), secrets.token_hex(4), os.urandom(3), random.SystemRandom().random()]
        random.seed()
        np.random.seed()
        found += [
            random.random(),
            np.random.rand(),
            np.random.default_rng().random(),
            np.random.default_rng(3).random(),
        ]
        found.append(input("go on? "))
    return found


@pytest.mark.parametrize("clocks", both_ways(), ids=["store", "memory"])
def test_each_rank_is_told_what_the_main_rank_was(clocks: list[Clock]) -> None:
    told = []
    with mock.patch.object(builtins, "input", side_effect=["yes", "no", "never", "never"]):
        for made in clocks:
            with made.installed(), mock.patch.object(time, "timezone", 0):
                told.append(asked())
            time.sleep(0.01)
    main, peer = told
    assert main == peer
    assert (main[24], main[49]) == ("yes", "no")
    changing = [number for number in range(25) if number not in (3, 8, 23, 24)]
    for number in changing[:2] + changing[7:8] + changing[13:]:
        assert main[number] != main[number + 25], "each call has a value of its own"
    assert pickle.loads(pickle.dumps(main[9])) == main[9]
    assert time.time() != main[0]
    assert imported_before.now() > main[9]


def test_clocks_of_whole_seconds_are_the_main_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    days, told = itertools.count(365), []
    monkeypatch.setattr(clock, "_time", lambda: next(days) * 86400.0 + 43200)
    for world in worlds():
        with Clock(world).installed():
            told.append([time.localtime()[:3], time.gmtime()[:3], time.ctime()[-4:], time.asctime()[-4:]])
            told[-1].append(time.strftime("%Y"))
    assert told == 2 * [[(1971, 1, 1), (1971, 1, 2), "1971", "1971", "1971"]]


def test_a_class_may_hold_a_clock() -> None:
    """It gets no instance as its first argument, as a function of Python would."""
    told = []
    for world in worlds():
        with Clock(world).installed():
            timer: Any = type("Timer", (), {"now": time.time, "local": time.localtime})()
            told.append((timer.now(), tuple(timer.local())))
    assert told[0] == told[1]


def test_a_file_of_any_name_asks() -> None:
    told = []
    for world in worlds():
        with Clock(world).installed():
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(compile("import time\nfound = time.time()", os.fsdecode(b"caf\xe9.py"), "exec"), names)
            told.append(names["found"])
    assert told[0] == told[1]


def test_who_is_not_told() -> None:
    """Threads, children, what a rank does apart from others, and libraries have the time themselves."""
    _, peer = worlds(side_timeout_s=0.05)
    with Clock(peer).installed(), current().part(Counts).alone():
        assert abs(time.time() - time.clock_gettime(time.CLOCK_REALTIME)) < 5
    with Clock(peer).installed():
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(time.time()))
        thread.start()
        thread.join()
        library: dict[str, Any] = {"__name__": "tqdm.std"}
        exec(compile("import time\nfound = time.time()", "tqdm/std.py", "exec"), library)
        assert abs(found[0] - library["found"]) < 5
        time.monotonic(), time.perf_counter()
        with pytest.raises(WorldError, match=r"rank 1 reached .*test_clock\.py:\d+ \(call 1\)"):
            time.time()


def test_a_line_that_only_the_main_rank_runs_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_NUM_KEPT", 4)
    memory = mmap.mmap(-1, 4 * 40)
    main, peer = Readings(memory), Readings(memory)
    assert peer.told("train.py:1", 0) is None
    for number in range(6):
        main.tell("of_main.py:1", number, struct.pack("<q", -1))
        main.tell("train.py:1", number, struct.pack("<q", number))
        assert peer.told("train.py:1", number + 1) is None
        assert peer.told("train.py:1", number) == struct.pack("<q", number)
    assert peer.told("of_main.py:1", 5) == struct.pack("<q", -1)
    assert peer.told("of_main.py:1", 0) is None, "forgotten: it holds as many as the memory"


def test_a_loop_that_waits_overtakes_no_rank_that_is_seconds_late() -> None:
    main, start = Readings(mmap.mmap(-1, Readings.SIZE)), time.monotonic()
    for number in range(4 * 1024):
        main.tell("train.py:1", number, b"12345678")
    assert time.monotonic() - start > 0.3, "2**16 readings take 6 s"


def test_what_is_half_written_is_not_read() -> None:
    memory = mmap.mmap(-1, Readings.SIZE)
    main, peer = Readings(memory), Readings(memory)
    main.tell("train.py:1", 0, b"12345678")
    memory[26] += 1
    assert peer.told("train.py:1", 0) is None
    memory[26] -= 1
    assert peer.told("train.py:1", 0) == b"12345678"


def test_a_rank_that_is_too_far_behind_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_NUM_KEPT", 4)
    for clocks in both_ways():
        for made in clocks:
            with made.installed(), contextlib.ExitStack() as until:
                if made is clocks[1]:
                    until.enter_context(pytest.raises(WorldError, match="the main rank ran it more often"))
                for _ in range(6 if made is clocks[0] else 1):
                    time.time()


def decide() -> Any:
    here, counts = ddpshim.world(), []
    readings = shared_readings(here)
    assert readings is not None
    with Clock(here, readings).installed():
        here.barrier()
        time.sleep(0.05 * here.rank)
        for _ in range(3):
            start, count = time.time(), 0
            while time.time() - start < 0.03:
                count += 1
                time.sleep(0.001)
            counts.append(count)
        name = f"run_{imported_before.now():%H%M%S%f}_{uuid.uuid4().hex}"
        here.barrier()
    return counts, name


@pytest.mark.ranks
def test_ranks_decide_alike_by_the_time_that_has_passed() -> None:
    main, peer = run_ranks(decide, 2)
    assert main == peer
    assert min(main[0]) > 1
