"""`python -m ddpshim check`: it says yes to clean trainers, and where others part (all of them: evidence/bugs.py)."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, Union

import pytest
import torch
from packaging.version import Version

from ddpshim import variables
from ddpshim.errors import LaunchError, SyncError
from ddpshim.launch.runner import Launch
from ddpshim.tools import check, judging, new_files, run_records, watching
from ddpshim.tools.comparing import Parting
from ddpshim.trainers.unedited.file_calls import watched
from evidence import bugs
from tests.preloaded import environment, start_afresh
from tests.preloaded_commands import patience

BUGS = {bug.name: bug for bug in bugs.BUGS}


@pytest.mark.unit
def test_sketch_tells_size_of_difference() -> None:
    one = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    other = one + 1e-3 * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    told = run_records.difference(watching.sketch(one), watching.sketch(other))
    assert told == pytest.approx(float((one - other).norm() / one.norm()), rel=0.5)
    assert run_records.difference(watching.sketch(one), watching.sketch(one.clone())) == 0
    assert run_records.difference(watching.sketch(one), None) == math.inf
    assert run_records.difference(None, watching.sketch(torch.zeros(3))) == 0
    factor, left = run_records.ratio(watching.sketch(one) or [], watching.sketch(2 * one) or [])
    assert (factor, left) == (pytest.approx(2.0), pytest.approx(0.0, abs=1e-6))


def _write(
    folder: Path,
    run: str,
    gradient: float = 1.0,
    loss: Union[float, list[float]] = 1.0,
    num_steps: int = 1,
    dtype: str = "float32",
    samples: str = "",
    num_batches: Optional[int] = None,
    draws: str = "",
    is_share: bool = False,
    change: Callable[[dict[str, Any]], object] = lambda line: None,
) -> None:
    """Write the records of a run. `draws`: what its own generator is at first, from which it draws for each batch."""
    tensor = watching.sketch(torch.tensor([1.0, 2.0]))
    lines: list[dict[str, Any]] = []
    for t in range(num_steps):
        if samples:
            of_pass = {"sampler": "RandomSampler", "pass_number": 1, "num_batches": num_batches, "num_samples": 10}
            batch = {"samples": list(samples), "shuffles": None, "loader": 1, "indices": None}
            batch.update(is_share=is_share, streams=f"{draws}{t}" if draws else None)
            lines.append({"kind": "batch", "t": t, "place": "train.py:2", **batch, **of_pass})
        streams = f"{draws}{t + 1}" if draws else None
        of_loss = {
            "losses": [loss[t] if isinstance(loss, list) else loss],
            "dtype": dtype,
            "streams": streams,
            "place": "train.py:3",
        }
        lines.append({"kind": "loss", "t": t, **of_loss})
        own = [watching.sketch(torch.tensor([1.0, -3.0]) * gradient)]
        about = {"optimizer": 0, "place": "train.py:4"}
        lines.append(
            {"kind": "gradients", "t": t, "gradients": own, "lr": [0.1], "names": ["w"], "weights": [tensor], **about}
        )
        lines.append({"kind": "step", "t": t + 1, "seconds": 0.01 * t, "replayed": None, "weights": [tensor], **about})
    for line in lines:
        change(line)
    (folder / f"{run}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _change(line: dict[str, Any], **of_kinds: dict[str, Any]) -> None:
    for kind in ("every", line["kind"]):
        line.update(of_kinds.get(kind, {}))


def _add(folder: Path, run: str, kind: str, **values: object) -> None:
    with (folder / f"{run}.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, "t": 0, **values}) + "\n")


def _parting(folder: Path, num_ranks: int = 2) -> Parting:
    proof = judging.judge(folder, num_ranks)
    assert not proof.is_same
    assert proof.parting is not None
    return proof.parting


@pytest.mark.unit
@pytest.mark.parametrize(
    ("dtype", "one", "of_ranks", "says"),
    [
        ("float32", 1.0, [1.0, 1.0], None),
        ("float32", 1.0, [2.0, 2.0], "added up, not averaged"),
        ("float32", 1.0, [0.5, 0.5], "averaged twice"),
        ("float32", 1.0, [1.003, 1.003], "clipped or scaled differently"),
        ("float32", 1.0, [1.5, 0.5], "they are not reduced"),
        ("float32", 0.0, [1.0, 1.0], ""),
        ("bfloat16", 1.0, [1.003, 1.003], None),
        ("bfloat16", 1.0, [2.0, 2.0], "added up, not averaged"),
        ("bfloat16", 1.0, [0.0, 0.0], "cut off (detach)"),
        ("bfloat16", 1.0, [1.01, 0.99], "they are not reduced"),
    ],
)
def test_names_what_gradients_are(
    tmp_path: Path, dtype: str, one: float, of_ranks: list[float], says: Optional[str]
) -> None:
    """bfloat16 makes a gradient 0.3% larger, and makes no rank's differ from another's; in float32 it is a mistake."""
    for run, size in {"one": one, "rank_0": of_ranks[0], "rank_1": of_ranks[1]}.items():
        loss = 1.005 if run.startswith("rank") and dtype == "bfloat16" else 1.0
        _write(tmp_path, run, size, loss=loss, dtype=dtype)
    proof = judging.judge(tmp_path, 2)
    coarse = "computed in bfloat16: rounding is 65,536 times larger than in float32"
    assert (coarse in proof.notes) == (dtype == "bfloat16")
    assert proof.is_same == (says is None)
    if proof.parting is not None:
        assert (proof.parting.what, proof.parting.where, proof.parting.place) == ("gradients", "w", "train.py:4")
        assert str(says) in proof.parting.meaning
    for run in ("rank_0", "rank_1"):
        _write(tmp_path, run, dtype="float16")
    assert _parting(tmp_path).found == f"computed in {dtype} in one process, in float16 on ranks"


@pytest.mark.unit
@pytest.mark.parametrize(("second", "is_same"), [(0.0, False), (9e-6, False), (9e-5, True)])
def test_rounding_grows_from_step_to_step_and_a_mistake_is_there_at_once(
    tmp_path: Path, second: float, is_same: bool
) -> None:
    """A loss that is off by 0.5% is a mistake, and rounding where the step before was off by a hundredth of it."""
    for run, off in {"one": 0, "rank_0": 1, "rank_1": 1}.items():
        _write(tmp_path, run, loss=[1 + off * 9e-6, 1 + off * second, 1 + off * 5e-3], num_steps=3)
    assert judging.judge(tmp_path, 2).is_same == is_same


@pytest.mark.unit
@pytest.mark.parametrize(
    ("apart", "is_same"),
    [((0, 5e-3, 0), True), ((0, 5e-3, 5e-3), False), ((5e-3, 0, 0), False), ((0, 5e-2, 0), False)],
)
@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_a_gradient_that_is_off_a_little_in_one_step_was_turned_by_rounding(
    tmp_path: Path, apart: tuple[float, ...], is_same: bool, num_optimizers: int
) -> None:
    """With two optimizers, that make steps alternately (a GAN), steps of the second one."""

    def alternate(line: dict[str, Any], is_rank: bool = True) -> None:
        if line["kind"] in ("gradients", "step"):
            own, line["optimizer"] = divmod(line["t"] - (line["kind"] == "step"), num_optimizers)
            if is_rank and line["kind"] == "gradients" and line["optimizer"] == num_optimizers - 1:
                line["gradients"] = [watching.sketch(torch.tensor([1.0, -3.0]) * (1 + apart[own]))]

    num_steps = 3 * num_optimizers
    _write(tmp_path, "one", num_steps=num_steps, change=functools.partial(alternate, is_rank=False))
    for run in ("rank_0", "rank_1"):
        _write(tmp_path, run, num_steps=num_steps, change=alternate)
    assert judging.judge(tmp_path, 2).is_same == is_same


@pytest.mark.unit
@pytest.mark.parametrize(
    ("losses", "streams", "moved", "says"),
    [
        ([2.0, 1.0], 7, 0.0, "BatchNorm with local statistics"),
        ([1.0, 2.0], 7, 0.0, "losses were equal in the steps before"),
        ([1.0, 2.0], None, 0.0, "with DDPSHIM_CAPTURE=off, and with DDPSHIM_ROWS=off"),
        ([1.0, 2.0], 7, 5e-3, "weights differ by 0.005 of the distance they moved: the optimizer has another learn"),
    ],
)
def test_why_a_loss_differs(
    tmp_path: Path, losses: list[float], streams: Optional[int], moved: float, says: str
) -> None:
    """What the first step has shown to be right is not named, nor what cannot be where ddpshim computes the batch."""
    for is_rank, run in enumerate(("one", "rank_0")):
        weights = {"weights": [watching.sketch(torch.tensor([2.0, 2.0 + moved * is_rank]))]}
        known = {"streams": streams if is_rank else None}
        change = functools.partial(_change, every=known, step=weights)
        _write(tmp_path, run, loss=losses if is_rank else 1.0, num_steps=2, samples="ab", change=change)
    found = _parting(tmp_path, 1)
    assert (found.what, found.step) == ("loss", losses.index(2.0) + 1)
    assert says in found.meaning


@pytest.mark.unit
@pytest.mark.parametrize(("size", "is_same"), [(3e-6, True), (3e-4, False)])
def test_a_gradient_that_cancels_is_rounding_alone(tmp_path: Path, size: float, is_same: bool) -> None:
    """Of a bias before BatchNorm in float32: 3e-6 of all gradients, of which nothing is right; in float64 2e-14."""
    for run, cancelled in (("one", size), ("rank_0", -size), ("rank_1", -size)):
        own = [*map(watching.sketch, (torch.ones(1), torch.tensor([cancelled])))]
        both = {"names": ["w", "0.bias"], "gradients": own, "weights": own[:1] * 2}
        _write(tmp_path, run, change=functools.partial(_change, gradients=both, step={"weights": own[:1] * 2}))
    assert judging.judge(tmp_path, 2).is_same == is_same


def _write_weights(
    folder: Path, run: str, bias: float, beside: str = "mean", begun_with: float = 0.0, dtype: str = "float32"
) -> None:
    """Write a step in which 100 weights move by 1, and a bias in a direction of its own."""
    begun = [*map(watching.sketch, (torch.zeros(100), torch.tensor([begun_with])))]
    moved = [*map(watching.sketch, (torch.ones(100), torch.tensor([bias])))]
    first = {"names": ["w", "0.bias"], "gradients": [moved[0], None], "weights": begun}
    _write(folder, run, dtype=dtype, change=functools.partial(_change, gradients=first, step={"weights": moved}))
    for t in range(2) if begun_with else [1]:
        _add(folder, run, "state", t=t, tensors={f"Net~1#1.{beside}": moved[1] if t else begun[1]})


@pytest.mark.unit
def test_weights_that_rounding_alone_moves_are_no_difference(tmp_path: Path) -> None:
    """Adam moves a bias before BatchNorm by full steps at random; its average, and the running mean, follow it."""
    for follows in ("1.running_mean", "ema.0.bias"):
        _write_weights(tmp_path, "one", 1.0, follows)
        for rank in (0, 1):
            _write_weights(tmp_path, f"rank_{rank}", -1.0, follows)
        assert judging.judge(tmp_path, 2).is_same
    _write_weights(tmp_path, "rank_1", 1.0, "ema.0.bias")
    assert _parting(tmp_path).what == "weights", "they differ between ranks, which rounding does not"
    for buffer in ("mean", "1.running_var"):
        for run, bias in {"one": 1.0, "rank_0": -1.0, "rank_1": -1.0}.items():
            _write_weights(tmp_path, run, bias, buffer)
        assert (_parting(tmp_path).what, _parting(tmp_path).where) == ("networks", f"Net.{buffer}")
    for run, bias in {"one": 1.001, "rank_0": 1.002, "rank_1": 1.002}.items():
        _write_weights(tmp_path, run, bias, "ema.0.bias", begun_with=1.0, dtype="bfloat16")
    assert judging.judge(tmp_path, 2).is_same, "the bias moved by less than one bit of bfloat16"


@pytest.mark.unit
def test_an_average_may_differ_by_the_last_bit(tmp_path: Path) -> None:
    """By 0.5% of its size in bfloat16, although that is 20% of the distance that it moved."""
    for dtype, average, is_same in (("bfloat16", 1.005, True), ("bfloat16", 1.01, False), ("float32", 1.005, False)):
        for run, own in (("one", 1.0), ("rank_0", average), ("rank_1", average)):
            _write(tmp_path, run, dtype=dtype)
            for t, x in enumerate((0.975, own)):
                _add(tmp_path, run, "state", t=t, tensors={"Net~1#1.ema": watching.sketch(torch.full((100,), x))})
        assert judging.judge(tmp_path, 2).is_same == is_same
        if not is_same:
            assert _parting(tmp_path).what == "networks"


@pytest.mark.unit
def test_what_data_parallel_training_changes_is_by_design_and_mistakes_beside_it_are_named(tmp_path: Path) -> None:
    assert judging.judge(tmp_path, 2) == judging.Proof(False, 0, 2), "nothing was compared"

    def write(
        of_ranks: str, draws: str = "", gradients: tuple[float, float] = (1.0, 1.0), is_share: bool = True
    ) -> None:
        _write(tmp_path, "one", samples="abcd")
        for rank, own in enumerate((of_ranks[:2], of_ranks[2:])):
            generator = draws[rank : rank + 1]
            _write(tmp_path, f"rank_{rank}", gradients[rank], 9.0, samples=own, draws=generator, is_share=is_share)

    write("acef", draws="gh")
    proof = judging.judge(tmp_path, 2)
    assert (proof.is_same, proof.parting) == (False, None)
    said = check.as_text(proof)
    assert said.startswith("the same experiment: no, by design: data parallel ranks differ from one process in\n")
    assert "sample order (setup() has" in said
    assert "random numbers (per rank" in said
    assert '`python -m ddpshim run`, or ddpshim.setup(batch="global")' in said
    assert "usually" not in said
    write("abcd", draws="gh", is_share=False)
    assert [own.partition(" (")[0] for own in judging.judge(tmp_path, 2).by_design] == ["random numbers"]
    write("acef", gradients=(1.5, 0.5))
    assert (_parting(tmp_path).what, judging.judge(tmp_path, 2).by_design) == ("gradients", [])
    write("acef", draws="gg")
    assert (_parting(tmp_path).what, "use the same random numbers" in _parting(tmp_path).meaning) == ("noise", True)
    write("acef", is_share=False)
    assert _parting(tmp_path).what == "samples"
    write("abcd")
    assert _parting(tmp_path).what == "loss"


@pytest.mark.unit
def test_an_optimizer_has_a_number_of_its_own_also_after_others_were_freed(tmp_path: Path) -> None:
    (tmp_path / watching.SETTINGS).write_text("{}")
    recorder, weight = watching.RankRecorder(tmp_path, "one"), torch.ones(2, requires_grad=True)
    for _ in range(3):
        optimizer = torch.optim.SGD([weight], 0.1)
        recorder._before_step(optimizer, (), {})
        recorder._after_step(optimizer, (), {})
        del optimizer
    recorder._file.close()
    assert [record["optimizer"] for record in run_records.RunRecords(tmp_path, "one").all("step")] == [0, 1, 2]


@pytest.mark.unit
def test_a_rank_that_stops_drawing_while_others_go_on_is_in_eval_mode(tmp_path: Path) -> None:
    """Not one whose last two batches have nothing to draw for."""

    def stop(line: dict[str, Any], at: int) -> None:
        if line["kind"] == "loss" and line["t"] >= at:
            line["streams"] = f"g{line['t']}"  # as before the batch

    for at, is_found in ((0, True), (2, True), (3, False), (5, False)):
        _write(tmp_path, "one", samples="abcd", num_steps=5)
        _write(tmp_path, "rank_0", samples="ab", draws="g", num_steps=5, change=functools.partial(stop, at=at))
        for rank, own in ((1, "c"), (2, "d")):
            _write(tmp_path, f"rank_{rank}", samples=own, draws="hi"[rank - 1], num_steps=5)
        parting = judging.judge(tmp_path, 3).parting
        assert (parting is not None) == is_found
        if parting is not None:
            assert (parting.step, parting.what, parting.place) == (at + 1, "noise", "train.py:3")
            assert parting.found == "rank 0 uses no random numbers from this step on, while other ranks do in each step"


@pytest.mark.unit
def test_samples_that_differ_by_what_they_draw_alone_do_so_by_design(tmp_path: Path) -> None:
    """One process draws samples a to d at indices 0 to 3, ranks e to h; a few are drawn again from equal numbers."""

    def write(of_ranks: str, sums: float = 1.0, num_common: int = 1, streams: str = "xy") -> Optional[Parting]:
        ranks = ("rank_0", "ef", of_ranks[:2]), ("rank_1", "gh", of_ranks[2:])
        for run, samples, indices in (("one", "abcd", "0123"), *ranks):
            _write(tmp_path, run, samples=samples, change=functools.partial(_change, batch={"indices": [*indices]}))
            drawn = {i: [1.0, 1.0 if run == "one" else sums] for i in indices[:num_common]}
            _add(tmp_path, run, "drawn", loader=1, samples=drawn, streams=streams[run == "rank_1"])
        return judging.judge(tmp_path, 2).parting

    assert write("0213") is None
    (found,) = judging.judge(tmp_path, 2).by_design
    assert found.startswith("random numbers of samples, as of augmentation")
    _add(tmp_path, "rank_0", "drawn", loader=2, samples={"0": [7.0]}, streams="z")  # of a loader that trains nothing
    assert judging.judge(tmp_path, 2).parting is None
    for parting, what, meaning in (
        (write("0245"), "samples", "a different sample order (RandomSampler in one process, RandomSampler on"),
        (write("0213", sums=1.1), "samples", "the same indices give other samples"),
        (write("0213", num_common=0), "samples", "the same indices give other samples"),
        (write("0213", streams="xx"), "noise", "ranks use the same random numbers"),
    ):
        assert parting is not None
        assert (parting.what, meaning in parting.meaning) == (what, True)
        assert "(augmentation)" not in parting.meaning


@pytest.mark.unit
def test_shows_the_answer_on_a_line_of_its_own() -> None:
    proof = judging.Proof(True, 20, 2, 3e-8, "a step took 12.3 ms", notes=["noted"])
    assert check.as_text(proof).splitlines() == [
        "note: noted",
        "the same experiment: yes",
        "  20 steps on 2 ranks; then weights differ from the single-process ones by 3e-08 of their size",
        "  a step took 12.3 ms",
        "  not compared: numbers that the program prints, logs or saves beside its networks; steps after these",
    ]
    assert check.as_text(judging.Proof(False, 0, 2)) == "the same experiment: no"


@pytest.mark.unit
def test_other_numbers_of_steps_are_no(tmp_path: Path) -> None:
    """An early stop by a rank's own loss, a rank that stops alone, a program that fails in one process."""
    for run in ("one", "rank_0", "rank_1"):
        _write(tmp_path, run, num_steps=2 if run.startswith("rank") else 4)
    found = _parting(tmp_path)
    assert (found.step, found.what, found.place) == (3, "steps", "train.py:4")
    assert found.found == "one process made 4 steps, the ranks 2"
    _write(tmp_path, "rank_1", num_steps=4)
    assert _parting(tmp_path).found == "one process made 4 steps, the ranks 2 to 4"
    _write(tmp_path, "rank_0", num_steps=4)
    assert judging.judge(tmp_path, 2).is_same
    _add(tmp_path, "one", "failed", error="OSError: no space")
    assert judging.judge(tmp_path, 2).notes[-1].endswith("after its last step, and not on the ranks: OSError: no space")
    _write(tmp_path, "one", num_steps=3)
    _add(tmp_path, "one", "failed", error="OSError: no space")
    assert _parting(tmp_path).meaning == "the program failed in one process: OSError: no space"
    # The proof itself ended them, one optimizer's step earlier.
    _write(tmp_path, "one", num_steps=3)
    _add(tmp_path, "one", "cut")
    proof = judging.judge(tmp_path, 2)
    assert (proof.is_same, proof.num_steps) == (True, 3)


@pytest.mark.unit
def test_optimizers_that_take_turns_otherwise_are_no(tmp_path: Path) -> None:
    """Before, the steps of one had no partner, and were not compared."""
    for run in ("one", "rank_0"):
        other = {"optimizer": int(run == "rank_0")}
        _write(tmp_path, run, change=functools.partial(_change, gradients=other, step=other))
    assert _parting(tmp_path, 1).found == "optimizer 1 made the step in one process, optimizer 2 on the ranks"


@pytest.mark.unit
def test_the_difference_of_weights_is_that_after_the_last_common_step(tmp_path: Path) -> None:
    changed = {"weights": [watching.sketch(torch.tensor([1.0, 2.0 + 1e-5]))]}
    for run, num_steps, step in (("one", 2, {}), ("rank_0", 1, changed)):
        _write(tmp_path, run, num_steps=num_steps, change=functools.partial(_change, step=step))
        _add(tmp_path, run, "cut")
    proof = judging.judge(tmp_path, 1)
    assert proof.difference == pytest.approx(4.5e-6, rel=0.5)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("of_ranks", "num_batches", "says"),
    [
        (("ab", "cd"), (3, 2), "drop_last=False keeps the last batch"),
        (("ab", "cd"), (9, 3), "the loaders have other data"),
        (("abcd", "abcd"), (3, 3), "every rank reads the same samples"),
        (("abcd", "efgh"), (3, 2), "as large as that of the single process. Build the loader with ddpshim.make_loader"),
    ],
)
def test_samples_of_a_pass(tmp_path: Path, of_ranks: tuple[str, str], num_batches: tuple[int, int], says: str) -> None:
    """They are compared before what follows from them: rates by the length of the loader, losses."""
    for run, samples in {"one": "abcd", "rank_0": of_ranks[0], "rank_1": of_ranks[1]}.items():
        is_rank = run.startswith("rank")
        own = functools.partial(_change, every={"streams": run if is_rank else None})  # under DDP, drawn or not
        _write(tmp_path, run, loss=1.0 + is_rank, samples=samples, num_batches=num_batches[is_rank], change=own)
    found = _parting(tmp_path)
    assert (found.step, found.what, found.place) == (1, "samples", "train.py:2")
    assert says in found.meaning
    if num_batches == (3, 2) and of_ranks[1] == "cd":
        said = "an epoch has 3 batches in one process, 2 on the ranks: ranks read 8 of 10 samples"
        assert found.found == said


@pytest.mark.unit
def test_a_batch_that_ddpshim_gives_to_every_rank_whole_counts_once(tmp_path: Path) -> None:
    """Its ranks draw what one process draws; under DDP with its own numbers, every rank reads the same samples."""
    for run in ("one", "rank_0", "rank_1"):
        _write(tmp_path, run, samples="abc")
    assert judging.judge(tmp_path, 2).is_same
    _write(tmp_path, "rank_1", samples="abd")
    assert _parting(tmp_path).found == "3 samples in one process, 6 on 2 ranks, 3 common"
    for run in ("rank_0", "rank_1"):
        _write(tmp_path, run, samples="abc", change=functools.partial(_change, every={"streams": run}))
    assert "every rank reads the same samples" in _parting(tmp_path).meaning


@pytest.mark.unit
def test_precision_of_a_backward_pass() -> None:
    net = torch.nn.Linear(8, 4)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    assert watching.of_graph([net(x).sum()]) == torch.float32
    # Before torch 2.6 nodes do not show dtypes: every graph counts as float32 (docs/check.md).
    shown = torch.bfloat16 if Version(torch.__version__).release >= (2, 6) else torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert watching.of_graph([net(x).float().mean()]) == shown
        with torch.no_grad():
            frozen = net(x).float()
    assert watching.of_graph([net.weight.sum() * frozen.sum()]) == torch.float32


@pytest.mark.unit
def test_ranks_that_failed_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A guard may have ended them for what the first samples explain; without a difference there is nothing to say.

    A third run that fails leaves the answer as it is, and is named.
    """

    def run_one(
        job: Launch, folder: Path, logs: Path, settings: watching.ProofSettings, name: str, own: object
    ) -> None:
        if name == watching.AGAIN:
            raise LaunchError("it made 0 steps in 300 s")
        _write(folder, name, samples="abcd")

    def run(job: Launch) -> int:
        for rank in (0, 1):
            own = functools.partial(_change, every={"streams": rank})
            _write(Path(job.proof or ""), f"rank_{rank}", samples=of_ranks[rank], change=own)
        return 1

    monkeypatch.setattr(check.runner, "check", lambda job, environ: None)
    monkeypatch.setattr(check, "_run_one", run_one)
    monkeypatch.setattr(check, "run", run)
    of_ranks = ["abcd", "abcd"]
    job = Launch(["train.py"], log_dir=str(tmp_path / "logs"))
    proof = check.check(job, watching.ProofSettings())
    assert proof.parting is not None
    assert "ddpshim.make_loader" in proof.parting.meaning
    assert (
        proof.notes[-1]
        == f"the ranks ended with exit code 1 after [1, 1] steps; their output is in {tmp_path / 'logs'}"
    )
    said = "without run 3 the answer does not tell rounding from a mistake: it made 0 steps in 300 s"
    assert said in capsys.readouterr().err
    of_ranks = ["ab", "cd"]
    with pytest.raises(LaunchError, match=r"the ranks made \[1, 1\] steps and ended with exit code 1"):
        check.check(job, watching.ProofSettings())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("of_ranks", "again", "verdict", "said"),
    [
        ({"samples": "abce"}, {"samples": "abcf"}, "unknown", "seed, train.py:2"),
        ({"samples": "abce"}, {}, "no", "samples, train.py:2"),
        ({"gradient": 1.5}, {"gradient": 1.1}, "unknown", "rounding of gradients of w, train.py:4"),
        ({"gradient": 1.5}, {"gradient": 1.01}, "no", "gradients of w, train.py:4"),
        ({"loss": 1.5, "gradient": 2.0}, {"loss": 1.5}, "no", "gradients of w, train.py:4"),
    ],
)
def test_no_is_said_of_what_two_runs_in_one_process_do_not_show(
    tmp_path: Path, of_ranks: dict[str, Any], again: dict[str, Any], verdict: str, said: str
) -> None:
    for run, given in {"one": {}, "rank_0": of_ranks, "again": again}.items():
        _write(tmp_path, run, **{"samples": "abcd", **given})
    shown = check.as_text(judging.judge(tmp_path, 1)).splitlines()
    assert shown[:2] == [f"the same experiment: {verdict}", f"  differs first in step 1: {said}"]


@pytest.mark.unit
def test_gradients_that_differ_between_ranks_are_no_rounding(tmp_path: Path) -> None:
    for run, size in {"one": 1.0, "rank_0": 1.4, "rank_1": 1.6, "again": 1.5}.items():
        _write(tmp_path, run, size)
    assert "they are not reduced" in _parting(tmp_path).meaning


@pytest.mark.unit
@pytest.mark.parametrize(("first", "answer"), [(2, (True, 2, None)), (1, (False, 4, "rounding"))])
def test_yes_is_said_of_the_steps_before_rounding(tmp_path: Path, first: int, answer: tuple[Any, ...]) -> None:
    def differ(line: dict[str, Any]) -> None:
        if line["kind"] == "gradients" and line["t"] >= first:
            line["gradients"] = [[4 * number for number in line["gradients"][0]]]

    _write(tmp_path, "one", num_steps=4)
    for run in ("rank_0", "rank_1", "again"):
        _write(tmp_path, run, num_steps=4, change=differ)
    proof = judging.judge(tmp_path, 2)
    assert (proof.is_same, proof.num_steps, proof.parting and proof.parting.what) == answer


def _check(folder: Path, program: str, num_ranks: int = 2, steps: int = 20, *arguments: str) -> tuple[int, str]:
    (folder / "train.py").write_text(program)
    settings = ["--json", "--nproc", str(num_ranks), "--steps", str(steps)]
    return bugs.command(["check", *settings, "train.py", *arguments], folder)


@pytest.mark.launch
def test_a_rank_that_waits_forever_is_ended_and_its_line_named(tmp_path: Path) -> None:
    (tmp_path / watching.SETTINGS).write_text(json.dumps({"timeout_s": 1}))
    (tmp_path / "train.py").write_text("import time, torch\ntime.sleep(3600)\n")
    environ = {**environment(), variables.CHECK: str(tmp_path)}
    code, said = start_afresh(["-m", "ddpshim.launch.rank", "train.py"], environ, tmp_path, patience(60))
    assert code == 1, said
    assert "rank 0 made 0 of 20 steps in 1 s, and is at train.py:2: ranks wait for each other forever, or need" in said


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nudged_are_results_of_training_by_the_last_bit(dtype: torch.dtype) -> None:
    numbers = torch.linspace(0, 1, 101, dtype=dtype, requires_grad=True) * 1
    nudged = watching._nudged(torch.nn.Identity(), (), numbers)
    changed = ((numbers - nudged) / numbers)[1:]
    assert nudged.dtype == dtype
    assert 0.4 * torch.finfo(dtype).eps < changed.mean() < changed.max() <= 3 * torch.finfo(dtype).eps
    assert (nudged[[0, -1]].tolist(), changed.min().tolist()) == ([0, 1], 0)


@pytest.mark.unit
def test_results_that_are_not_nudged() -> None:
    trained = torch.linspace(0, 1, 101, requires_grad=True) * 1
    of_half = (trained.bfloat16(), trained.half(), trained.to(torch.complex64), trained.to_sparse())
    parameter = torch.nn.Parameter(torch.rand(3))
    for given in (
        trained.detach(),
        trained.long(),
        trained > 0,
        (trained, trained),
        None,
        parameter,
        trained[:0],
        *of_half,
    ):
        assert watching._nudged(torch.nn.Identity(), (), given) is given
    with watching.replaced(torch.jit, "is_tracing", lambda: True):
        assert watching._nudged(torch.nn.Identity(), (), trained) is trained
    jacobian = torch.func.jacrev(lambda x: watching._nudged(torch.nn.Identity(), (), x.sin()))(torch.rand(3))
    assert jacobian.shape == (3, 3)


_GROWS = """
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0 if "seeded" in sys.argv else time.time_ns())
x = torch.linspace(-1, 1, 3000).reshape(1000, 3)
net = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step, (x, y) in enumerate(DataLoader(TensorDataset(x, x.sin().sum(1)), 200)):
    optimizer.zero_grad()
    grows = 1e6 if step > 2 else 1.0
    ((net(x)[:, 0] - y) * grows).sin().mean().backward()
    optimizer.step()
"""


@pytest.mark.launch
def test_rounding_that_training_amplifies_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.ROWS, "all")
    code, said = _check(tmp_path, _GROWS, 3, 20, "seeded")
    proof = json.loads(said[said.index("{\n") :])
    assert (code, proof["num_steps"]) == (0, 3), said
    assert "another run in one process, which is rounded otherwise, is as far from the first" in proof["notes"][-1]
    code, said = _check(tmp_path, _GROWS, 3, 20)
    proof = json.loads(said[said.index("{\n") :])
    assert (code, proof["parting"]["what"]) == (2, "seed"), said
    assert proof["parting"]["found"] == "another run in one process differs, too: weights at the start in step 1"


_IMAGES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
x, y = torch.randn(33, 3, 32, 32), torch.randn(33, 2)


class Images(Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, i):
        return {"x": x[i] + torch.randn(3, 32, 32), "y": y[i]}


convolutions = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU()
net = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
loader = DataLoader(Images(), 16, shuffle=True, num_workers=2, persistent_workers=True)
for batch in (batch for epoch in range(4) for batch in loader):
    optimizer.zero_grad()
    nn.functional.mse_loss(net(batch["x"]), batch["y"]).backward()
    optimizer.step()
"""


@pytest.mark.launch
@pytest.mark.parametrize("draws", ["one_process", "sample"])
def test_images_augmented_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draws: str) -> None:
    """Biases before BatchNorm have gradients of rounding alone; the last batch of a pass has a single sample, for three
    ranks; and killed workers leave no folders. With draws by sample one rank of `run` is the reference."""
    monkeypatch.setenv("DDPSHIM_DRAWS", draws)
    temporary = Path(tempfile.mkdtemp(prefix="t-"))  # sockets need a short path
    monkeypatch.setenv("TMPDIR", str(temporary))
    try:
        code, said = _check(tmp_path, _IMAGES, 3, 8)
        assert code == 0, said
        assert '"num_steps": 8' in said
        assert not [*temporary.glob("pymp-*")]
    finally:
        shutil.rmtree(temporary)
    assert "rm -r" not in said


_AUGMENTED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Shifted(Dataset):
    x = torch.randn(48, 12, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 48

    def __getitem__(self, i):
        first = int(torch.randint(4, ()))
        return self.x[i, first : first + 8], self.x[i, :2].sin()

if __name__ == "__main__":
    dist.init_process_group("gloo")
    num_workers, offset = map(int, sys.argv[1:])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    model = DistributedDataParallel(net)
    sampler = DistributedSampler(Shifted())
    loader = DataLoader(Shifted(), 12 // dist.get_world_size(), sampler=sampler, num_workers=num_workers)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    torch.manual_seed(1 + offset * dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()
"""


@pytest.mark.launch
@pytest.mark.parametrize(("num_workers", "offset"), [(0, 1), (2, 0)])
def test_a_port_by_hand_with_augmentation(tmp_path: Path, num_workers: int, offset: int) -> None:
    """With a seed of its own on each rank, or with one seed for the data workers of all."""
    code, said = _check(tmp_path, _AUGMENTED, 3, 6, f"{num_workers}", f"{offset}")
    assert code == 1, said
    proof = json.loads(said[said.index("{\n") :])
    if offset:
        (found,) = proof["by_design"]
        assert found.startswith("random numbers of samples, as of augmentation")
    else:
        assert (proof["parting"]["what"], proof["by_design"]) == ("noise", [])
        assert "seed them with a hash of seed and rank" in proof["parting"]["meaning"]


_READY = """
import torch
from torch.utils.data import DataLoader

torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for x, y in DataLoader(torch.randn(12, 2), 4, num_workers=1, collate_fn=lambda x: (torch.stack(x, 1), torch.ones(3))):
    optimizer.zero_grad()
    (net(x).sum() * y.sum()).backward()
    optimizer.step()
"""


@pytest.mark.launch
def test_a_batch_whose_tensors_have_no_common_rows_is_one_batch_on_all_ranks(tmp_path: Path) -> None:
    code, said = _check(tmp_path, _READY, 2, 3)
    assert code == 0, said


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("the weights of a sampler are lost on several ranks", "raw"),
        ("advantages are normalised over each rank's own batch", "ours"),
    ],
)
def test_clean(tmp_path: Path, name: str, trainer: str) -> None:
    """A port by hand with noise of its own, whose sampler draws in each epoch; and losses over the whole batch."""
    writes = "import os, torch; os.makedirs('out', exist_ok=True); torch.save([], 'out/last.pt'); print('loud')\n"
    code, said = _check(tmp_path, writes + BUGS[name].program(trainer, is_clean=True))
    assert code == 0, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ddpshim-logs", "output.txt", "train.py"]
    (logs,) = (tmp_path / "ddpshim-logs").glob("2*")
    names = ["one.log", "rank_0.log", "rank_1.log"]
    counts = {**dict.fromkeys(names, 1), "check.md": 0}
    assert {path.name: path.read_text().count("loud") for path in logs.iterdir()} == counts
    assert "loud" not in said
    assert '"is_same": true' in said


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "what", "says"),
    [
        ("the network is called past its wrapper", "gradients", "they are not reduced"),
        ("the mean of a masked loss is over each rank's own entries", "loss", "a loss that is not a mean over samples"),
        ("the weights of a sampler are lost on several ranks", "samples", "ranks use DistributedSampler"),
    ],
)
def test_finds(tmp_path: Path, name: str, what: str, says: str) -> None:
    code, said = _check(tmp_path, BUGS[name].program("raw"))
    assert code == 1, said
    parting = json.loads(said[said.index("{\n") :])["parting"]
    assert parting["what"] == what
    assert bugs.read_page(bugs.PAGE.read_text())[name].buggy["check"].findings[0] == what
    assert says in parting["meaning"]
    line = int(parting["place"].rpartition(":")[2])
    assert re.search(r"for x, y in|\.step\(|backward", (tmp_path / "train.py").read_text().splitlines()[line - 1])


@pytest.mark.launch
def test_nothing_to_compare(tmp_path: Path) -> None:
    code, said = _check(tmp_path, "raise SystemExit('no data')\n")
    assert code == 2
    assert "in one process the trainer made no step, neither plainly nor as a single rank" in said
    assert said.rstrip().endswith("no data")


@pytest.mark.unit
def test_a_file_is_copied_as_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's own `open` raises for a file that the main rank has changed since."""
    old = tmp_path / "old.bin"
    old.write_bytes(b"old" * 50_000)
    old.chmod(0o640)
    os.utime(old, (1e9, 1e9))

    def refuse(*_: object, **__: object) -> None:
        raise SyncError("the main rank has changed it")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        copy = Path(new_files.NewFiles(tmp_path)._copy(str(old)))
    assert copy.read_bytes() == old.read_bytes()
    assert (copy.stat().st_mode, copy.stat().st_mtime) == (old.stat().st_mode, 1e9)


@pytest.mark.unit
def test_removes_what_the_runs_made_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also nothing at all, if the runs changed what existed: a copy that they made may be the only one."""
    monkeypatch.chdir(tmp_path)
    records, runs = tmp_path / "records", tmp_path / "runs"
    not_seen: list[str] = []

    def left(change: Callable[[], object], has_link: bool = False) -> tuple[list[str], list[str]]:
        """The files in `runs` after a proof whose runs do this to a folder with one file, and what it says."""
        for folder in (records, runs):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        (runs / "old.txt").write_text("old")
        if has_link:
            os.symlink("old.txt", "runs/link")
        seen = new_files.NewFiles(records)._see
        with watched(lambda path, *more: None if not_seen else seen(path, *more)):
            change()
        said = [sentence.replace(f"{tmp_path}/", "") for sentence in new_files.remove(records)]
        return sorted(str(path.relative_to(runs)) for path in runs.rglob("*")), said

    def usual() -> None:
        os.makedirs("runs/a/models")
        os.makedirs("runs/a", exist_ok=True)
        Path("runs/a/models/partial").write_text("x")
        os.replace("runs/a/models/partial", "runs/a/models/last.pth")
        Path("runs/a/models/last.pth").write_text("again")
        os.rename("runs/a", "runs/b")
        os.symlink("b", "runs/latest")
        os.link("runs/old.txt", "runs/old_again.txt")
        Path("runs/b/gone").touch()
        os.remove("runs/b/gone")
        folder = os.open("runs/b", os.O_RDONLY)
        os.mkdir("inside", dir_fd=folder)
        os.close(folder)
        file, temporary = tempfile.mkstemp()
        os.close(file)
        os.rename(temporary, "runs/temporary.txt")
        open("runs/old.txt", "a").close()  # changes nothing
        with contextlib.suppress(OSError):
            os.rmdir("runs")

    assert left(usual) == (["old.txt"], [])

    def unseen() -> None:
        os.makedirs("runs/a/b")
        Path("runs/a/seen").touch()
        not_seen.append("from here on")
        Path("runs/a/b/unseen").touch()
        not_seen.clear()

    found, said = left(unseen)
    assert found == ["a", "a/b", "a/b/unseen", "old.txt"]
    assert said[0].startswith("1 new path left: ")
    assert said[0].endswith(": rm -r runs/a")

    def moved() -> None:
        Path("runs/new").touch()
        os.rename("runs/old.txt", "runs/older.txt")

    def rewritten() -> None:
        Path("runs/old.txt").write_text("new")
        Path("runs/new").touch()

    for change in (moved, rewritten, lambda: os.truncate("runs/old.txt", 1)):
        found, said = left(change)
        assert found == ["old.txt"]
        assert said[0].startswith("restored 1 file that the trainer changed: ")
        assert said[0].endswith("runs/old.txt")

    def relinked() -> None:
        os.remove("runs/link")
        os.symlink("elsewhere", "runs/link")
        Path("runs/new").touch()

    found, said = left(relinked, has_link=True)
    assert found == ["link", "new", "old.txt"]
    assert said[0].startswith("the trainer changed runs/link, which existed before. Nothing was removed")
    assert said[0].endswith("may be the only copy of it. They made: runs/new")
