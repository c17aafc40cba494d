"""Samples are functions of their index, as a probe shows, or fetched once: batches have the bits of one process."""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import functools
import multiprocessing
import os
import pickle
import queue
import random
import secrets
import select
import signal
import sys
import tempfile
import threading
import time
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info

import ddpshim
from ddpshim.errors import DataError, SyncError
from ddpshim.process.random_streams import digest
from ddpshim.rows import loader, probe
from ddpshim.rows.relay import Address, Lines
from ddpshim.rows.samples import Batches
from ddpshim.rows.tensor import leaves
from tests.preloaded_commands import patience
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
X = torch.arange(200.0).reshape(50, 4).sin()
RNG, PY, GENERATOR = np.random.default_rng(0), random.Random(0), torch.Generator()
FOLDER = Path(tempfile.mkdtemp())
_VISITS: collections.Counter[int] = collections.Counter()
_COUNT = multiprocessing.Value("i", 0)


class Data(Dataset[Any]):
    """50 samples, which `get` returns."""

    rng = np.random.default_rng(2)

    def __init__(self, get: Callable[[Any, int], Any], **held: Any) -> None:
        self.get = get
        vars(self).update(held)

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return self.get(self, i)


def _closure() -> Callable[[Any, int], Any]:
    own = np.random.default_rng(1)
    return lambda data, i: X[i] + float(own.normal())


def _counted(data: Any, i: int) -> Any:
    _VISITS[i] += 1
    return X[i] * _VISITS[i]


def _with_the_one_before(data: Any, i: int) -> Any:
    last, data.last = getattr(data, "last", X[i]), X[i]
    return X[i] + last


def _evicts(data: Any, i: int) -> Any:
    cache = vars(data).setdefault("cache", collections.OrderedDict())
    cache[i] = 1
    return X[i], len(cache)


def _seeks(data: Any, i: int) -> Any:
    data.file.seek(4 * i)
    return X[i] + len(data.file.read(4))


def _tells_all(data: Any, i: int) -> Any:
    with _COUNT.get_lock():
        _COUNT.value += 1
    return X[i]


def _caches(data: Any, i: int) -> Any:
    file = FOLDER / f"{i}"
    if not file.exists():
        file.write_text("1")
    return X[i]


def _saves(data: Any, i: int) -> Any:
    file = FOLDER / f"{i}.pth"
    if not file.exists():
        torch.save(X[i], file)
    return torch.load(file)


def _file(text: str = "0123456789" * 40) -> Any:
    (FOLDER / "lines").write_text(text)
    return open(FOLDER / "lines")


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: Data(lambda data, i: X[i]),
    "a list of tensors": lambda: [*X],
    "a cache": lambda: Data(lambda data, i: vars(data).setdefault(i, X[i] * 2)),
    "lru_cache": lambda: Data(lambda data, i: functools.lru_cache(None)(lambda j: X[j] * 2)(i)),
    "a seed by index": lambda: Data(lambda data, i: X[i] + float(np.random.default_rng(i).normal())),
    "an open file": lambda: Data(_seeks, file=_file()),
    "dicts and texts": lambda: Data(lambda data, i: {"x": (X[i], i, 0.5), "text": f"{i}"}),
    "a shared tensor that is read": lambda: Data(lambda data, i: data.shared[i] + 0, shared=X.clone().share_memory_()),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: Data(lambda data, i: X[i] + torch.rand(())),
    "numpy": lambda: Data(lambda data, i: X[i] + np.random.rand()),
    "Python": lambda: Data(lambda data, i: X[i] + random.random()),
    "a generator of the file": lambda: Data(lambda data, i: X[i] + float(RNG.normal())),
    "a Random of the file": lambda: Data(lambda data, i: X[i] + PY.random()),
    "torch's of the file": lambda: Data(lambda data, i: X[i] + torch.rand((), generator=GENERATOR)),
    "a closure": lambda: Data(_closure()),
    "a class": lambda: Data(lambda data, i: X[i] + float(data.rng.normal())),
    "visits": lambda: Data(_counted),
    "the one before": lambda: Data(_with_the_one_before),
    "the size of a cache": lambda: Data(_evicts),
    "the next line": lambda: Data(lambda data, i: (X[i], data.file.read(2)), file=_file()),
    "time": lambda: Data(lambda data, i: time.time_ns()),
    "the system": lambda: Data(lambda data, i: os.urandom(4)),
    "an error": lambda: Data(lambda data, i: 1 // 0),
    "an object": lambda: Data(lambda data, i: ctypes.c_int(i)),
    "a counter of processes": lambda: Data(_tells_all),
    "a shared tensor that is written": lambda: Data(
        lambda data, i: data.shared[i].add_(1).clone(), shared=X.clone().share_memory_()
    ),
    "a file that it writes": lambda: Data(_caches),
    "a file that torch writes": lambda: Data(_saves),
    "no end": lambda: Data(lambda data, i: time.sleep(1000)),
}


@pytest.mark.parametrize("kind", [*FUNCTIONS, *OTHERS])
def test_the_probe(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_DEADLINE_S", 1 if kind == "no end" else patience(60))
    data = {**FUNCTIONS, **OTHERS}[kind]()
    place = data.file.tell() if hasattr(data, "file") else 0
    before = digest(), GENERATOR.get_state(), RNG.bit_generator.state, PY.getstate()
    found = probe.probed(DataLoader(data, 8, shuffle=True))
    assert bool(found.why) == (kind in OTHERS), found
    assert torch.equal(before[1], GENERATOR.get_state())
    assert (digest(), RNG.bit_generator.state, PY.getstate()) == (before[0], *before[2:])
    assert (not _VISITS, _COUNT.value, {file.name for file in FOLDER.iterdir()} <= {"lines"}) == (True, 0, True)
    if hasattr(data, "file"):
        assert os.lseek(data.file.fileno(), 0, os.SEEK_CUR) == place
        data.file.close()
    if hasattr(data, "shared"):
        assert torch.equal(data.shared, X)


def test_the_first_workers_dataset_is_probed() -> None:
    def start(worker: int) -> None:
        get_worker_info().dataset.own = np.random.default_rng(worker)

    def get(data: Any, i: int) -> Any:
        return X[i] + (data.own.random() if hasattr(data, "own") else 0)

    assert not probe.probed(DataLoader(Data(get), 8)).why
    assert probe.probed(DataLoader(Data(get), 8, num_workers=2, worker_init_fn=start)).why
    plain: Any = DataLoader(Data(get), 8, num_workers=2)  # torch's collate, which asks whether it is in a worker
    assert probe.probed(plain, plain.collate_fn).why == ""


def test_a_sampler_may_draw_from_pythons_generator_which_a_fork_seeds_anew() -> None:
    """It has no length: torch asks for none."""

    class Shuffled(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(range(len(X)), len(X)))

    plain = DataLoader(Data(lambda data, i: X[i]), 8, sampler=Shuffled())
    one, other = probe.probed(plain), probe.probed(plain)
    assert (one.why, probe.first_difference(one, other)) == ("", "")
    assert one.samples[0][0] == str(next(iter(Shuffled())))


def test_ranks_with_other_data_are_told_the_sample() -> None:
    one, other = (probe.probed(DataLoader(Data(lambda data, i, by=by: X[i] * by), 8)) for by in (1, 1.5))  # type: ignore[misc]
    near = probe.probed(DataLoader(Data(lambda data, i: X[i] * (1 + 1e-6)), 8))
    assert [probe.first_difference(one, theirs) for theirs in (one, near, other)] == ["", "", "sample 0 is another"]
    missing = probe.probed(DataLoader(Data(lambda data, i: X[i] * float("nan")), 8))
    assert [probe.first_difference(missing, theirs) for theirs in (missing, one)] == ["", "sample 0 is another"]
    longer = probe.probed(DataLoader([*X, X[0]], 8, shuffle=True))
    assert "the first batch has index" in probe.first_difference(one, longer)
    assert probe.first_difference(one._replace(num_samples=50), one._replace(num_samples=58)) == (
        "50 samples here and 58 there"
    )


def test_entries_of_the_program_in_torchs_collate_see_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = DataLoader(Data(lambda data, i: X[i]), 8)
    assert loader._is_torchs(plain)
    monkeypatch.setitem(torch.utils.data._utils.collate.default_collate_fn_map, Data, lambda batch, **_: batch)
    assert not loader._is_torchs(plain)


# Batches on three ranks


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, 47, step):
            yield X[i] + torch.rand(()), random.random(), f"text {i}"


class Pair(NamedTuple):
    x: torch.Tensor
    texts: list[str]


def _collate(samples: list[Any]) -> Any:
    """A mapping with a tensor for each sample, one for all, a list, two views of one memory, and a draw."""
    x = default_collate([x for x, _ in samples])
    return UserDict(pair=Pair(x * torch.rand(()), [f"{i}" for _, i in samples]), sum=x.sum(0), views=[x[:, 0], x[:, 1]])


def _fails_at_30(data: Any, i: int) -> Any:
    if i == 30:
        raise ValueError("sample 30 is broken")
    return X[i] + torch.rand(())


def _replaces_30(data: Any, i: int) -> Any:
    """A broken sample is replaced by a random other one: the first draw comes late."""
    while i == 30:
        i = int(torch.randint(50, ()))
    return X[i]


def _some_draw(data: Any, i: int) -> Any:
    """Some samples draw, and none that the probe fetches."""
    return (X[i] + torch.rand(()) if i % 11 == 5 else X[i]), i


def _own_start(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)
    get_worker_info().dataset.start = worker  # type: ignore[union-attr]


def _of_worker(data: Any, i: int) -> Any:
    return X[i] + np.random.rand() + getattr(data, "start", -1)


def _joined(data: Any, indices: Any) -> Any:
    return [X[i] + len(indices) for i in indices]


def _whole(batch: Any) -> list[Any]:
    inner = batch.data if isinstance(batch, UserDict) else batch
    return [x.tolist() if isinstance(x, torch.Tensor) else x for x in leaves(inner)]


def _passes(loader: Any, ends: tuple[int, ...] = (99, 99)) -> list[Any]:
    """What passes over a loader give, each abandoned before a step."""
    found: list[Any] = []
    for end in ends:
        with contextlib.suppress(ZeroDivisionError):
            for step, batch in enumerate(loader):
                if step == end:
                    break
                found.append(_whole(batch))
    return found


def _resumed(loader: Any, step: int = 3) -> list[Any]:
    """What a pass gives from a step on, as if the steps before it had been made."""
    torch.manual_seed(7)
    if hasattr(loader, "enter"):
        loader.enter(0, step)
        found = [*map(_whole, loader)]
    else:
        found = [*map(_whole, loader)][step:]
    torch.manual_seed(7)  # a resumed program restores its own streams
    return found


def _side_by_side(loader: Any) -> list[Any]:
    return [_whole(both) for both in zip(loader, loader)]


def _ahead(loader: Any, ends: tuple[int, ...] = (99, 99), reads: Any = None) -> list[Any]:
    """The same of passes that begin here and that a thread walks, which may read batches too."""

    def produced(walk: Any) -> Iterator[Any]:
        batches: queue.Queue[Any] = queue.Queue(2)

        def produce() -> None:
            for batch in walk:
                batches.put((batch, reads and reads(leaves(batch)[0])))
            batches.put(None)

        threading.Thread(target=produce, daemon=True).start()
        return iter(batches.get, None)

    found: list[Any] = []
    for end in ends:
        for step, (batch, read) in enumerate(produced(iter(loader))):
            if step == end:
                break
            found.append([read, _whole(batch)])
    return found


WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}
NO_WORKER = {"num_workers": 0, "multiprocessing_context": None}
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], Any]] = {
    "samples that draw": (OTHERS["torch"], {}, _passes),
    "a generator of the file": (OTHERS["a generator of the file"], {}, _passes),
    "visits": (OTHERS["visits"], {}, _passes),
    "workers that stay": (OTHERS["visits"], {"persistent_workers": True}, functools.partial(_passes, ends=(2, 99, 99))),
    "a pass that is abandoned": (OTHERS["numpy"], {}, functools.partial(_passes, ends=(1, 3, 99))),
    "two passes side by side": (OTHERS["torch"], {}, _side_by_side),
    "functions of their index": (FUNCTIONS["dicts and texts"], {}, _passes),
    "a first draw that comes late": (lambda: Data(_replaces_30), {"shuffle": True}, _passes),
    "a resumed pass": (lambda: Data(_some_draw), {"batch_size": 9}, _resumed),
    "a stream": (Stream, {}, _passes),
    "a spawned worker": (
        Stream,
        {"multiprocessing_context": "spawn", "num_workers": 1},
        functools.partial(_passes, ends=(99,)),
    ),
    "a stream of samples": (Stream, {"batch_size": None}, _passes),
    "batches of the program's own": (
        lambda: Data(lambda data, i: X[: 9 + i % 4] + torch.rand(())),
        {"batch_size": None},
        _passes,
    ),
    "a collate function": (lambda: Data(lambda data, i: (X[i], i)), {"collate_fn": _collate}, _passes),
    "__getitems__": (lambda: type("Joins", (Data,), {"__getitems__": _joined})(OTHERS["torch"]().get), {}, _passes),
    "worker_init_fn": (lambda: Data(_of_worker), {"worker_init_fn": _own_start}, _passes),
    "a batch sampler": (
        OTHERS["torch"],
        {"batch_sampler": [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9, 7, 9]]},
        _passes,
    ),
    "one worker": (OTHERS["Python"], {"num_workers": 1}, _passes),
    "four workers": (OTHERS["Python"], {"num_workers": 4, "prefetch_factor": 1}, _passes),
    "no worker": (OTHERS["a closure"], NO_WORKER, _passes),
    "a counter of processes": (OTHERS["a counter of processes"], {}, _passes),
    "a thread, draws": (OTHERS["torch"], {"shuffle": True}, functools.partial(_ahead, ends=(1, 99))),
    "a thread, own rows": (FUNCTIONS["a tensor"], {"shuffle": True}, functools.partial(_ahead, ends=(1, 99))),
    "a thread, no worker": (
        FUNCTIONS["dicts and texts"],
        {"shuffle": True, **NO_WORKER},
        functools.partial(_ahead, reads=lambda x: float(x.mean())),
    ),
    "a thread, draws, no worker": (OTHERS["numpy"], {"shuffle": True, **NO_WORKER}, _ahead),
}


def _seen(kind: str) -> Any:
    make, options, walk = KINDS[kind]
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    _VISITS.clear()
    batches = {} if {"batch_sampler", "batch_size"} & {*options} else {"batch_size": 11}
    batches_of: Any = torch.utils.data.DataLoader(make(), **{**WORKERS, **batches, **options})
    return walk(batches_of), digest()


def _of_ranks() -> Any:
    ddpshim.cleanup()
    alone = {kind: _seen(kind) for kind in KINDS}
    global RNG
    RNG = np.random.default_rng(0)
    ddpshim.setup(batch="global", seed=1, device="cpu")
    return alone, {kind: _seen(kind) for kind in KINDS}


def _outlives() -> list[str]:
    ddpshim.cleanup()
    ddpshim.setup(batch="global", seed=1, device="cpu")
    (batch, *_) = torch.utils.data.DataLoader(Data(lambda data, i: X[i]), 12)
    out = torch.nn.Linear(4, 2)(batch)
    ddpshim.cleanup()
    said = []
    uses = float, torch.Tensor.tolist, pickle.dumps, copy.deepcopy, np.asarray, repr, torch.sum, torch.Tensor.clone
    for use in uses:
        with pytest.raises(SyncError, match="after the job has ended") as error:
            use(out)
        said.append(str(error.value))
    return said


@pytest.mark.unit
@pytest.mark.skipif(sys.platform != "linux", reason="data workers of a node do not meet")
def test_workers_meet_in_the_thousandth_pass() -> None:
    batches = Batches(DataLoader([*X]), list, Address(32 * "0", 0, 0, 1), False)
    for _ in range(1000):
        batches.begin_pass()
    assert batches._address is not None
    Lines(batches._address, 0).send(lambda rank: None)  # it has no peers, but listens for them


@pytest.mark.unit
@pytest.mark.skipif(sys.platform != "linux", reason="data workers of a node do not meet")
def test_an_owner_that_ends_in_the_middle_of_a_message_is_named() -> None:
    lines, (ours, theirs) = Lines(Address(32 * "0", 1, 1, 2), 0), multiprocessing.Pipe()
    with theirs:
        os.write(theirs.fileno(), (1000).to_bytes(4, "big") + bytes(20))  # of 1000
    with ours:
        lines._of_ranks[-1] = ours
        with pytest.raises(DataError, match=r"data worker 0 of local rank 0, which fetches .* has ended"):
            lines.receive()


@pytest.mark.skipif(sys.platform != "linux", reason="data workers of a node do not meet")
def test_a_worker_that_waits_for_another_rank_ends_with_its_own() -> None:
    """Else it keeps its rank's connections open, and ranks wait for one that was killed."""
    (alive, held), fork = os.pipe(), multiprocessing.get_context("fork")  # the worker holds an end of the pipe

    def work() -> None:
        batches = Batches(DataLoader([*X]), list, Address(secrets.token_hex(16), 0, 0, 2), False)
        batches.start_worker(0)
        assert batches._lines is not None
        batches._lines.all(True)  # its peer never comes

    def rank() -> None:
        fork.Process(target=work).start()
        os.kill(os.getpid(), signal.SIGKILL)

    process = fork.Process(target=rank)
    process.start()
    os.close(held)
    process.join(patience(20))
    assert process.exitcode == -signal.SIGKILL
    assert select.select([alive], [], [], patience(20))[0], "the worker goes on"
    assert os.read(alive, 1) == b""
    os.close(alive)


def test_a_row_tensor_that_outlives_its_job_is_an_error() -> None:
    for said in run_ranks(_outlives, 2):
        assert all("Read it before" in text for text in said)


def test_batches_of_three_ranks_have_the_bits_of_one_process() -> None:
    for alone, three in run_ranks(_of_ranks, 3, timeout_s=240):
        for kind in KINDS:
            (batches, state), (batches_of_three, state_of_three) = alone[kind], three[kind]
            assert state == state_of_three, kind
            assert len(batches) == len(batches_of_three) > 2, kind
            assert batches == batches_of_three, kind


# draws="sample"


def _all_draw(data: Any, i: int) -> Any:
    _VISITS[i] += 1
    return X[i] + torch.rand(()) + np.random.rand() + random.random(), i


def _joined_with_draws(data: Any, indices: Any) -> Any:
    return list(zip(X[indices] + torch.rand(len(indices), 1), indices))


BY_SAMPLE: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "samples that draw": (lambda: Data(_all_draw), {}),
    "workers that stay": (lambda: Data(_all_draw), {"persistent_workers": True, "shuffle": False}),
    "a Subset": (lambda: torch.utils.data.Subset(Data(_all_draw), range(3, 47)), {}),
    "a collate function": (lambda: Data(_all_draw), {"collate_fn": lambda samples: default_collate(samples[::-1])}),
    "__getitems__": (lambda: type("Joins", (Data,), {"__getitems__": _joined_with_draws})(_all_draw), {}),
    "no batches": (lambda: Data(_all_draw), {"batch_size": None}),
}


def _drawn_by_sample(kind: str, num_workers: int) -> Any:
    make, options = BY_SAMPLE[kind]
    torch.manual_seed(5)
    _VISITS.clear()
    workers = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    given = {"batch_size": 11, "shuffle": True, **workers, **options}
    return _passes(torch.utils.data.DataLoader(make(), **given)), torch.get_rng_state().tolist(), sum(_VISITS.values())


def _draw_by_sample() -> Any:
    cases = [(kind, workers) for kind in BY_SAMPLE for workers in (0, 2) if workers or kind != "workers that stay"]
    ddpshim.cleanup()
    alone = {case: _drawn_by_sample(*case) for case in cases}
    ddpshim.setup(batch="global", seed=1, device="cpu", options=ddpshim.Options.read(draws="sample"))
    return alone, {case: _drawn_by_sample(*case) for case in cases}


def test_samples_draw_the_same_on_any_number_of_ranks_and_workers() -> None:
    ((plain, one),), three = run_ranks(_draw_by_sample, 1), run_ranks(_draw_by_sample, 3, timeout_s=120)
    num_fetched = [of_rank["samples that draw", 0][2] for _, of_rank in three]
    assert (one["samples that draw", 0][2], sum(num_fetched)) == (100, 100)
    assert max(num_fetched) < 40
    for _, of_rank in three:
        assert [case for case in one if of_rank[case][:2] != one[case][:2]] == []
    for kind in BY_SAMPLE:
        batches, stream, _ = one[kind, 2]
        of_plain, stream_of_plain, _ = plain[kind, 2]
        assert (kind, 0) not in one or batches == one[kind, 0][0], kind
        assert stream == stream_of_plain, kind  # nothing is drawn from the training's
        assert [indices for _, indices in batches] == [indices for _, indices in of_plain], kind
    batches, _, _ = one["workers that stay", 2]
    first, second = ({i: x for xs, indices in part for x, i in zip(xs, indices)} for part in (batches[:5], batches[5:]))
    assert first.keys() == second.keys() == {*range(50)}
    assert [i for i in first if first[i] == second[i]] == []  # each pass has draws of its own
