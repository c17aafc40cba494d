"""Going on where a training was: at any step, on any number of ranks, exactly."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import ddpshim
from ddpshim import variables
from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint import resume
from ddpshim.checkpoint.progress_folder import find_progress, last_save
from ddpshim.checkpoint.resume import Resumable
from ddpshim.errors import OptionsError, RankError
from ddpshim.failures import preemption
from ddpshim.process import say
from ddpshim.process.job import current
from ddpshim.process.launch_env import EXIT_REQUEUE
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.replaced import replaced
from ddpshim.rows import loader as rows_loader
from evidence import equivalence, interruptions
from evidence.equivalence import copy_release
from tests.ranks import run_ranks
from tests.robomimic import require

N, B, EPOCHS = 40, 8, 3
DATA = TensorDataset(
    torch.randn(N, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(N)
)


class _Stream(IterableDataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return N

    def __iter__(self) -> Any:
        yield from torch.randperm(N).tolist()


def _train(
    folder: str,
    left: Optional[tuple[int, int, int]] = None,
    batch_size: int = B,
    num_steps: Optional[int] = None,
    in_background: bool = False,
) -> tuple[list[list[int]], dict[str, torch.Tensor], list[float], Any]:
    """(samples of each step, weights, noise drawn in each step, exit code); `left`: rank, epoch, step of a signal."""
    here = ddpshim.world()
    if in_background:
        checkpoint._LEAST_BYTES = 0
    resume._LOOK_EVERY_S = 0.0  # ranks meet at every step: a toy's training is over within half a second
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    net = ddpshim.wrap_parallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    every = 1 if in_background else None
    training = Resumable(
        folder, {"net": net, "optimizer": optimizer, "schedule": schedule}, every_n_steps=every, num_kept=3
    )
    went_on = training.restore()
    assert went_on == (find_progress(folder) is not None)
    loader = ddpshim.make_loader(DATA, batch_size=batch_size, shuffle=True, drop_last=True)
    seen, noise, code = [], [], None
    try:
        for epoch in range(training.epoch, EPOCHS):
            for x, index in training.steps(loader, epoch, num_steps):
                if left is not None and (training.epoch, training.step) >= left[1:] and here.rank == left[0]:
                    os.kill(os.getpid(), signal.SIGTERM)
                    left = None
                noise.append(torch.rand(()).item())
                training.values["steps"] = training.values.get("steps", 0) + 1
                seen.append(index.tolist())
                optimizer.zero_grad()
                net(x).pow(2).mean().backward()
                optimizer.step()
            schedule.step()
        training.finish()
        assert training.values["steps"] == EPOCHS * (num_steps or N // batch_size)
    except SystemExit as exit:
        code = exit.code
    finally:
        preemption.unlisten()
    return seen, {name: p.detach().clone() for name, p in net.state_dict().items()}, noise, code


@pytest.mark.unit
@pytest.mark.parametrize(
    ("before", "now", "is_left"),
    [
        ({}, {"SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7"}, True),
        ({"SLURM_JOB_ID": "6"}, {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7"}, False),  # another job's, of old
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "a"}, True),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "b"}, False),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "b"}, True),
        ({"SLURM_JOB_ID": "6"}, {"DDPSHIM_RESUME": "always", "SLURM_JOB_ID": "7"}, True),  # a chain of jobs
        ({}, {}, False),  # somebody trains anew
        ({}, {"DDPSHIM_RESUME": "never", "SLURM_RESTART_COUNT": "1"}, False),
    ],
)
def test_a_finished_training_that_is_started_again_leaves(
    before: dict[str, str],
    now: dict[str, str],
    is_left: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def start(environ: dict[str, str]) -> Resumable:
        for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**environ, "RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
        ddpshim.setup(device="cpu", timeout_s=77)
        training = Resumable(tmp_path / "resume", {})
        assert training._options.timeout_s == 77, "ranks wait as long as setup says"
        return training

    try:
        start(before).finish()
        ddpshim.cleanup()
        training = start(now)
        if is_left:
            with pytest.raises(SystemExit) as left:
                training.restore()
            assert left.value.code == 0
            assert "resume.finished); stopping with exit code 0" in capfd.readouterr().err
            assert current().world is None
        else:
            assert not training.restore()
    finally:
        preemption.unlisten()
        ddpshim.cleanup()


def _together(results: list[Any]) -> list[list[int]]:
    return [sorted(i for step in steps for i in step) for steps in zip(*(seen for seen, *_ in results))]


def test_a_signal_on_one_rank_costs_no_sample(tmp_path: Path) -> None:
    left, num_steps = tmp_path / "left", 12
    whole = run_ranks(_train, 2, str(tmp_path / "whole"), None, B, num_steps)
    # The process in the background imports torch with what others leave it of the cores.
    first = run_ranks(_train, 2, str(left), (1, 1, 2), B, num_steps, True, timeout_s=200)
    assert [code for *_, code in first] == [EXIT_REQUEUE] * 2
    assert num_steps + 2 < len(first[0][0]) < EPOCHS * num_steps
    shutil.copytree(left, tmp_path / "others")
    for folder, num_ranks, tolerance in ((left, 2, 0.0), (tmp_path / "others", 4, 1e-12)):
        rest = run_ranks(_train, num_ranks, str(folder), None, B, num_steps)
        assert _together(first) + _together(rest) == _together(whole)
        for _, weights, _, _ in rest:
            for name, value in whole[0][1].items():
                torch.testing.assert_close(weights[name], value, rtol=0, atol=tolerance)
        if num_ranks == 2:
            for before, after, uninterrupted in zip(first, rest, whole):
                assert before[2] + after[2] == uninterrupted[2]
        assert not folder.exists(), "a finished training leaves no progress behind"


def _accumulates(folder: str, kind: str, stop: int = -1) -> tuple[float, Any, str]:
    """Train with a step after three batches, some of which are of the epoch before; stop in batch `stop`."""
    resume._LOOK_EVERY_S, said = 0.0, io.StringIO()
    say.say_once.cache_clear()
    resume._MOST_BATCHES_OF_A_STEP = 2 if kind == "late" else 64
    holds_whole = kind in ("whole batches", "exact")
    options = ddpshim.Options.read(exact=6 if kind == "exact" else None)
    ddpshim.cleanup()
    here = ddpshim.setup(batch="global" if holds_whole else "local", seed=1, device="cpu", options=options)
    torch.manual_seed(3)
    net: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    data, b = TensorDataset(DATA.tensors[0][: 6 * B - 18]), 6
    if holds_whole:
        loader: Any = DataLoader(data, b, shuffle=True)
    else:
        net = ddpshim.wrap_parallel(net)
        loader = ddpshim.make_loader(data, batch_size=b, shuffle=True)

    def learn(net: Any, optimizer: Any, x: torch.Tensor, is_late: bool, is_last: bool) -> None:
        if is_late:
            optimizer.step()
            optimizer.zero_grad()
        with net.accumulate(is_last) if kind == "own gradients" else contextlib.nullcontext():
            net(x).pow(2).mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    optimizer, code = torch.optim.Adam(net.parameters(), lr=0.01), None
    training = Resumable(folder, {"net": net, "optimizer": optimizer})
    with contextlib.redirect_stderr(said):
        training.restore()
        try:
            for epoch in range(training.epoch, 4):
                for i, (x,) in enumerate(training.steps(loader, epoch)):
                    so_far = 5 * epoch + training.step
                    if so_far == stop and here.rank == 0:
                        os.kill(os.getpid(), signal.SIGTERM)
                    is_late = kind == "late" and so_far > 0 and so_far % 3 == 0
                    learn(net, optimizer, x, is_late, kind != "late" and (i + 1) % 3 == 0)
            training.finish()
        except SystemExit as exit:
            code = exit.code
        finally:
            preemption.unlisten()
    return float(sum(p.detach().abs().sum() for p in net.parameters())), code, said.getvalue()


WAITS = "SIGTERM on rank 0: saving after the optimizer's next step"
NEVER = "no batch of the last 2 ended with a step of an optimizer: gradients are saved, too. To accumulate them, count"
ACCUMULATING = {
    **dict.fromkeys(("shares", "own gradients", "exact", "whole batches"), (5, WAITS, "epoch 1, step 3")),
    "late": (7, NEVER, "epoch 1, step 3"),
}


def _accumulates_in_each_way(folder: Path) -> list[list[tuple[float, Any, str]]]:
    """What remains of trainings that were left, or of whole ones and of those that are left."""
    ways: list[list[tuple[float, Any, str]]] = []
    for kind, (stop, *_) in ACCUMULATING.items():
        is_first = not (folder / kind).exists()
        torch.distributed.barrier()
        ways.append([_accumulates(f"{folder}/whole {kind}", kind)] if is_first else [])
        ways[-1].append(_accumulates(str(folder / kind), kind, stop if is_first else -1))
    return ways


def test_gradients_that_are_not_used_yet_are_not_lost(tmp_path: Path) -> None:
    left, _ = run_ranks(_accumulates_in_each_way, 2, tmp_path)
    saved = [last_save(tmp_path / kind) for kind in ACCUMULATING]
    ranks = run_ranks(_accumulates_in_each_way, 3, tmp_path)
    for number, (kind, (_, text, place)) in enumerate(ACCUMULATING.items()):
        (expected, *_), (before, code, said) = left[number]
        assert (code, saved[number]) == (EXIT_REQUEUE, place), kind
        assert text in said, kind
        near = expected if kind == "exact" else pytest.approx(expected, rel=1e-13)
        for ((after, *_),) in (ways[number] for ways in ranks):
            assert after == near != pytest.approx(before), kind


@pytest.mark.unit
def test_a_damaged_file_is_set_aside_and_kept_and_the_one_before_it_used(tmp_path: Path, capfd: Any) -> None:
    whole, cut = tmp_path / "epoch_000000_step_000000001.pth", tmp_path / "epoch_000000_step_000000002.pth"
    torch.save({"a": torch.zeros(1000)}, whole)
    cut.write_bytes(whole.read_bytes()[:-100])
    assert find_progress(tmp_path) == whole
    assert f"{cut} is damaged" in capfd.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == [whole.name, f"{cut.name}.damaged"]


def test_other_data_or_another_batch_is_refused(tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path), (1, 0, 1))
    text = r"was left at step \d+ with steps of an epoch 5, and would resume with 10; samples would be seen twice"
    with pytest.raises(RankError, match=text):
        run_ranks(_train, 2, str(tmp_path), None, 4)
    with pytest.raises(
        RankError, match="with order 40 samples, seed 0, and would resume with 40 samples, seed 1; samp"
    ):
        run_ranks(_train, 2, str(tmp_path), seed=1)


def _rank_saves(folder: str) -> list[str]:
    training = Resumable(folder, {}, num_kept=2)
    for step in (3, 8, 12):
        training.step = step
        training.save()
    preemption.unlisten()
    ddpshim.world().barrier()
    return sorted(os.listdir(folder))


def test_the_newest_files_are_kept_and_no_later_ones_of_a_run_that_was_given_up(tmp_path: Path) -> None:
    (tmp_path / ".epoch_000000_step_000000001.pth.1-ab.partial").mkdir()
    (tmp_path / "epoch_000007_step_000000000.pth").touch()
    kept = ["epoch_000000_step_000000008.pth", "epoch_000000_step_000000012.pth"]
    assert run_ranks(_rank_saves, 2, str(tmp_path)) == [kept, kept]
    assert find_progress(tmp_path) == tmp_path / kept[1]
    assert find_progress(tmp_path / "nothing") is None


@pytest.mark.unit
@pytest.mark.parametrize("wrong", [{"every_s": 0}, {"num_kept": 0}, {"every_s": float("nan")}])
def test_nothing_to_go_on_from_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match=r"argument (checkpoint_every_s|keep_checkpoints): (0|nan); allowed: a "):
        Resumable(tmp_path, {}, **wrong)


# Entering a pass in the middle


class _AtOnce:
    """A batch sampler that draws when it is asked for an iterator."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(N)[: N // B * B].view(-1, B).tolist())

    def __len__(self) -> int:
        return N // B


class _Later(_AtOnce):
    """A batch sampler that draws with its first batch: after torch's loader has drawn the seed of workers."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()


class _Pool(_AtOnce):
    """A batch sampler that draws for each batch, by two generators, from what it has not yet drawn."""

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(N))
        for batch in range(len(self)):
            draw = np.random.randint if batch % 2 else lambda num: int(torch.randint(num, ()))
            yield [left.pop(draw(len(left))) for _ in range(B)]


class _Draws(list[int]):
    """Each sample draws in its own way, and every fifth not at all."""

    def __getitem__(self, index: Any) -> Any:
        if index % 5 == 0:
            return 1.0 * index
        return index + [torch.rand(()).item, random.random, np.random.rand][index % 3]()


def _joined(samples: list[float]) -> torch.Tensor:
    return torch.tensor(samples) + torch.rand(())


NUMBERS, DRAWS = list(range(N)), _Draws(range(N))
GIVEN = torch.Generator().manual_seed(7)
LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"batch_size": B, "shuffle": True},
    "sampler": lambda: {"batch_size": B, "sampler": RandomSampler(NUMBERS)},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(NUMBERS), B, True)},
    "drawn at once": lambda: {"batch_sampler": _AtOnce()},
    "drawn later": lambda: {"batch_sampler": _Later()},
    "drawn as it goes": lambda: {"batch_sampler": _Pool()},
    "in its own order": lambda: {"batch_size": B, "sampler": RandomSampler(NUMBERS, generator=GIVEN)},
    "draws": lambda: {"batch_size": B, "shuffle": True},
    "collates": lambda: {"batch_size": B, "shuffle": True, "collate_fn": _joined},
}
WORKERS: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 1, "multiprocessing_context": "fork"}


def _trained(batches: Iterator[Any], num: int = N) -> list[Any]:
    """`num` batches, for each of which the training draws, too."""
    return [(batch.tolist(), float(torch.rand(()))) for batch in itertools.islice(batches, num)]


def _enters(kind: str, **options: Any) -> list[Any]:
    """How many batches a pass has; whether it is entered as it was, in a new loader, with the pass after it."""
    data = DRAWS if kind in ("draws", "collates") else NUMBERS
    loader, entered = (ddpshim.make_loader(data, **LOADERS[kind](), **options) for _ in range(2))
    here = torch.device("cpu")
    loader.enter(4, 0)
    batches = iter(loader)
    whole = _trained(batches, 3)
    order, streams = copy.deepcopy(loader.order_state()), rank_states(here)
    whole += _trained(batches)
    after = _trained(iter(loader))
    entered.enter(4, 3, order, is_inside=True)
    restore_rank_states(streams, here)
    rest, again = (_trained(iter(entered)) for _ in range(2))
    return [len(whole), rest == whole[3:], again == after, after != whole]


def _enters_rows(draws: str) -> dict[str, list[Any]]:
    here = ddpshim.world()
    ddpshim.cleanup()
    ddpshim.setup(batch="global", seed=1, device="cpu", options=ddpshim.Options.read(draws=draws))
    entered = {kind: _enters(kind) for kind in LOADERS}
    by_workers = (
        ["drawn at once", "drawn later", "drawn as it goes", "draws", "collates"] if here.world_size > 1 else ["draws"]
    )
    for kind in ("draws", "drawn as it goes"):
        entered[f"{kind}, by workers that stay"] = _enters(kind, **WORKERS, persistent_workers=True)
    with contextlib.redirect_stderr(io.StringIO()) as said, replaced(rows_loader, "_MOST_DRAWS", 1):
        assert not all(_enters("drawn as it goes", **WORKERS))
    assert ("_Pool uses random numbers during iteration" in said.getvalue()) == here.is_main
    return {**entered, **{f"{kind}, by workers": _enters(kind, **WORKERS) for kind in by_workers}}


@pytest.mark.parametrize(("num_ranks", "draws"), [(1, "one_process"), (3, "one_process"), (3, "sample")])
def test_a_pass_over_row_tensors_is_entered_with_its_order_and_draws(num_ranks: int, draws: str) -> None:
    for entered in run_ranks(_enters_rows, num_ranks, draws):
        assert {kind for kind, found in entered.items() if found != [N // B, True, True, True]} == set()
        assert {*LOADERS, "draws, by workers"} <= {*entered}


def _rank_resumes_its_own_share(folder: str) -> list[list[int]]:
    """The order of an epoch over this rank's samples, and of the same epoch, saved after two steps and resumed."""
    here = ddpshim.world()
    ddpshim.wrap_parallel(torch.nn.Linear(1, 1))
    own = list(range(100 * here.rank, 100 * here.rank + 12))
    whole, resumed = [], []
    for is_resumed in (False, True):
        loader = ddpshim.make_loader(own, batch_size=4, shuffle=True, already_sharded=True)
        training = Resumable(folder, {})
        assert training.restore() == is_resumed
        for batch in training.steps(loader, 0):
            if training.step == 2 and not is_resumed:
                training.save()
            (resumed if is_resumed else whole).extend(batch.tolist())
        preemption.unlisten()
    return [whole, resumed]


def test_each_rank_resumes_the_order_of_its_own_share(tmp_path: Path) -> None:
    ranks = run_ranks(_rank_resumes_its_own_share, 2, str(tmp_path))
    for rank, (whole, resumed) in enumerate(ranks):
        assert sorted(whole) == list(range(100 * rank, 100 * rank + 12))
        assert resumed == whole[4:]
    assert [sample % 100 for sample in ranks[0][0]] != [sample % 100 for sample in ranks[1][0]]


def _rank_resumes_between_epochs(folder: str, kind: str) -> list[list[list[int]]]:
    """The batches of the last of three epochs, and of the same epoch as a resumed run has them."""
    if kind != "in any order":
        ddpshim.cleanup()
        ddpshim.setup(batch="global", seed=1, device="cpu")
    of_last: list[list[list[int]]] = []
    for _ in range(2):
        if kind == "in any order":
            loader: Any = ddpshim.make_loader(NUMBERS, batch_size=B, shuffle=True, in_order=False)
        elif kind == "own parts":
            own = [100 * ddpshim.world().rank + number for number in range(N // 2)]
            loader = ddpshim.make_loader(own, batch_size=B, shuffle=True, already_sharded=True)
        elif kind == "stream":
            loader = torch.utils.data.DataLoader(_Stream(), batch_size=B)
        else:
            loader = type("OfTheProgram", (torch.utils.data.DataLoader,), {})(NUMBERS, batch_size=B, shuffle=True)
        training = Resumable(folder, {}, every_n_steps=1)
        assert training.restore() == bool(of_last)
        for epoch in range(training.epoch, 3):
            batches = [batch.tolist() for batch in training.steps(loader, epoch)]
        of_last.append(batches)
        preemption.unlisten()
    return of_last


@pytest.mark.parametrize("kind", ["stream", "subclass", "own parts", "in any order"])
def test_a_loader_that_cannot_be_entered_in_the_middle_is_resumed_between_epochs(kind: str, tmp_path: Path) -> None:
    if kind == "in any order" and "in_order" not in inspect.signature(DataLoader.__init__).parameters:
        pytest.skip("this torch has no in_order")
    for whole, resumed in run_ranks(_rank_resumes_between_epochs, 2, str(tmp_path), kind):
        assert len(whole) == N // B
        assert resumed == whole


def _rank_enters_a_stream(folder: str) -> None:
    training = Resumable(folder, {})
    training.step = 1
    training.save()
    training.restore()
    next(training.steps(ddpshim.make_loader(_Stream(), batch_size=B, already_sharded=True), 0, num_steps=5))


def test_a_stream_of_shares_cannot_be_entered_in_the_middle(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="epoch 0 was left at step 1, but this loader cannot start mid-epoch"):
        run_ranks(_rank_enters_a_stream, 2, str(tmp_path))


@pytest.mark.unit
def test_listening_gives_the_signals_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    monkeypatch.setenv(variables.RUN_DIR, str(tmp_path))
    preemption.listen()
    assert [file.name for file in tmp_path.iterdir()] == [preemption.LISTENS], "for the last lines of `run`"
    assert preemption.asked() is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert preemption.asked() == "SIGUSR1"
    preemption.listen()
    assert preemption.asked() == "SIGUSR1", "listening twice forgets nothing"
    preemption.unlisten()
    assert preemption.asked() is None
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def _run(folder: Path, program: str, num_ranks: Optional[int] = None) -> tuple[int, str]:
    (folder / "program.py").write_text(program)
    return equivalence.fork(None, [str(folder / "program.py")], folder, num_ranks, {}, 100)


@pytest.mark.launch
def test_a_request_to_save_does_not_end_a_training_that_is_complete(tmp_path: Path) -> None:
    program = """
import os, signal
import ddpshim
ddpshim.setup(seed=1)
training = ddpshim.Resumable("progress", {})
training.finish()
os.kill(os.getpid(), signal.SIGUSR1)
ddpshim.cleanup()
os.kill(os.getpid(), signal.SIGUSR1)
print("nothing left to save", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""
    ended, said = _run(tmp_path, program, 1)
    assert "nothing left to save" in said
    assert ended == -signal.SIGTERM


GROUP = """
import multiprocessing, os, signal
import ddpshim
from ddpshim.failures import preemption
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.replaced import replaced
from ddpshim.rows import loader as rows_loader
from ddpshim.job.world import World
from ddpshim.process.job import current
from tests.resume.test_resume import NUMBERS

preemption.listen()
fork = multiprocessing.get_context("fork")
is_there = fork.Event()  # with the handlers of its own: a signal that comes while it is forked may be lost to it
child = fork.Process(target=lambda: (is_there.set(), signal.pause()))
child.start()
is_there.wait()
current().world = World(launcher="torchrun", seed=0)
loader = ddpshim.make_loader(NUMBERS, 8, num_workers=2)
batches = iter(loader)
seen = [next(batches), next(batches)]  # of both workers: they are there
os.killpg(0, signal.SIGTERM)
seen += list(batches)
child.join(10)
print(len(seen), preemption.asked(), child.exitcode)
"""


@pytest.mark.launch
def test_a_signal_to_all_processes_ends_neither_the_data_workers_nor_the_loop(tmp_path: Path) -> None:
    code, said = _run(tmp_path, GROUP)
    assert code == 0, said
    assert "5 SIGTERM -15" in said.splitlines()  # what newer torches say at the end comes after it


# The real trainer


@pytest.mark.launch
@pytest.mark.robomimic
def test_a_training_that_is_ended_again_and_again(
    tmp_path: Path, releases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("0.3.0")
    monkeypatch.setattr(interruptions, "EPOCHS", 4)
    kinds = ["SIGTERM to one", "SIGKILL to one", "SIGUSR1 to one"]
    found = interruptions.interrupt("0.3.0", "bc", 3, tmp_path, seed=4, kinds=kinds, releases=releases)
    assert [start["ended by"][0] for start in found["starts"][:-1]] == kinds
    assert all(start["steps"] for start in found["starts"])
    assert len({start["ranks"] for start in found["starts"]}) > 1
    assert found["same samples in every step"]
    assert found["steps"] == 100
    assert found["largest difference of a weight"] < 1e-12
    assert found["largest difference of a metric"] < 1e-12
    assert "resume" not in found["left on disk"]


@pytest.mark.launch
@pytest.mark.robomimic
def test_torchruns_restarts_go_on_where_the_rank_failed(tmp_path: Path, releases: Path) -> None:
    require("0.3.0")
    tree, data = copy_release("0.3.0", releases), equivalence.make_data(tmp_path, num_demos=50)
    config = equivalence.make_config(tree, "bc", data, tmp_path, 5, 1, train__data=str(data))
    # Rank 1 reads its 50 rows of each batch: it fails in the fourth step of every start, and the second has three steps
    # left. That is a step after the last save, which was on the disk before rank 0 took part in the third.
    faults = {"DDPSHIM_FAULT": "raise:1:175", "DDPSHIM_CHECKPOINT_EVERY_N_STEPS": "2"}
    run = ["ddpshim", "run", "--nproc", "2", "--max-restarts", "3", "-m", "tests.faults", "--config", str(config)]
    code, said = equivalence.fork(tree, run, tmp_path, None, faults, 250)
    assert code == 0, said[-3000:]
    assert said.count("ddpshim: 2 ranks on this machine") == 2
    assert "resuming at epoch 0, step 2, of a run on 2 ranks" in said
    assert [p.name for p in tmp_path.glob("out/*/*/models/*")] == ["model_epoch_1.pth"]
