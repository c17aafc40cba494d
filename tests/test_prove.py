"""`python -m ddpshim prove`: it says yes to clean trainers, and where others part (all of them: tests/bugs.py)."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from ddpshim.tools.prove import judging, sketches, watching
from ddpshim.tools.prove.noise import Placed
from tests import bugs

NOT_COMPARED = "samples were not compared, and ranks' noise was not replaced"
BUGS = {bug.name: bug for bug in bugs.BUGS}


@pytest.mark.unit
def test_sketch_tells_size_of_difference() -> None:
    one = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    other = one + 1e-3 * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    told = sketches.difference(sketches.sketch(one), sketches.sketch(other))
    assert told == pytest.approx(float((one - other).norm() / one.norm()), rel=0.5)
    assert sketches.difference(sketches.sketch(one), sketches.sketch(one.clone())) == 0
    assert sketches.difference(sketches.sketch(one), None) == math.inf
    assert sketches.difference(None, sketches.sketch(torch.zeros(3))) == 0
    factor, left = sketches.ratio(sketches.sketch(one) or [], sketches.sketch(2 * one) or [])
    assert (factor, left) == (pytest.approx(2.0), pytest.approx(0.0, abs=1e-6))


@pytest.mark.unit
def test_places_of_samples() -> None:
    assert watching._places(["c", "a"], ["a", "b", "c"], 0, 2) == [2, 0]
    assert watching._places(["c", "x"], ["a", "b", "c"], 0, 2) is None
    # A sample that is there twice is once each rank's, whether rows are dealt one by one or in two halves.
    assert [watching._places(["a", "b"], ["a", "a", "b", "b"], rank, 2) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert [watching._places(["a", "b"], ["a", "b", "a", "c"], rank, 2)[0] for rank in (0, 1)] == [0, 2]
    # Drawn three times, and twice for the main rank: no row is taken by both.
    assert [watching._places(["a"] * (2 - r), ["a", "a", "a", "b"], r, 2) for r in (0, 1)] == [[0, 2], [1]]


@pytest.mark.unit
def test_rows_of_the_one_process() -> None:
    share = Placed(0, 2, 2)
    share.places, share.num_whole, share.told = torch.tensor([3, 0]), 4, lambda: None
    assert share.whole((2, 5), (0, 1)) == [4, 5]
    assert share.whole((6, 5), (0, 3)) == [12, 5]
    whole = torch.arange(12)
    assert share.rows(whole[:4], (0, 1)).tolist() == [3, 0]
    assert share.rows(whole, (0, 3)).tolist() == [9, 10, 11, 0, 1, 2]
    assert share.among_others(torch.tensor([7, 8]), (0, 1)).tolist() == [8, 1, 1, 7]


def _write(folder: Path, run: str, gradient: float, loss: float = 1.0, num_steps: int = 1) -> None:
    """The records of a trainer with one weight."""
    tensor = sketches.sketch(torch.tensor([1.0, 2.0]))
    lines: list[dict[str, object]] = []
    for t in range(num_steps):
        lines.append({"kind": "loss", "t": t, "number": 1, "losses": [loss], "place": "train.py:3"})
        if t == 0:
            lines.append({"kind": "optimizer", "t": t, "optimizer": 0, "names": ["w"], "type": "SGD"})
            lines.append({"kind": "start", "t": t, "optimizer": 0, "weights": [tensor]})
        own = [sketches.sketch(torch.tensor([1.0, -3.0]) * gradient)]
        about = {"optimizer": 0, "step": t, "place": "train.py:4"}
        lines.append({"kind": "gradients", "t": t, "gradients": own, "lr": [0.1], **about})
        lines.append({"kind": "step", "t": t + 1, "weights": [tensor], "moments": {}, **about})
    (folder / f"{run}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("of_ranks", "what", "says"),
    [
        ([1.0, 1.0], None, ""),
        ([2.0, 2.0], "gradients", "added up, not averaged"),
        ([0.5, 0.5], "gradients", "averaged twice"),
        ([1.1, 1.1], "gradients", "clipped or scaled differently"),
        ([1.5, 0.5], "gradients", "they are not reduced"),
    ],
)
def test_names_what_gradients_are(tmp_path: Path, of_ranks: list[float], what: str, says: str) -> None:
    for run, size in {"one": 1.0, "perturbed": 1.0, "rank_0": of_ranks[0], "rank_1": of_ranks[1]}.items():
        _write(tmp_path, run, size)
    proof = judging.judge(tmp_path, 2)
    assert proof.is_same == (what is None)
    if proof.parting is not None:
        assert (proof.parting.what, proof.parting.where, proof.parting.place) == (what, "w", "train.py:4")
        assert says in proof.parting.meaning


@pytest.mark.unit
@pytest.mark.parametrize(("perturbed", "is_same"), [(1.0, False), (1.001, True)])
def test_tells_rounding_by_the_perturbed_run(tmp_path: Path, perturbed: float, is_same: bool) -> None:
    """A loss that is off by 1% is a mistake, and rounding where one rounding error made it 0.1%."""
    for run, loss in {"one": 1.0, "perturbed": perturbed, "rank_0": 1.005, "rank_1": 1.015}.items():
        _write(tmp_path, run, 1.0, loss)
    assert judging.judge(tmp_path, 2).is_same == is_same


@pytest.mark.unit
def test_says_where_noise_may_be_all_that_parts(tmp_path: Path) -> None:
    for run, size in {"one": 1.0, "perturbed": 1.0, "rank_0": 1.5, "rank_1": 0.5}.items():
        _write(tmp_path, run, size)
    assert judging.judge(tmp_path, 2).notes == ["no batch came from a DataLoader: " + NOT_COMPARED]
    with (tmp_path / "rank_1.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "own noise", "t": 0}) + "\n")
    assert "may be the only difference" in judging.judge(tmp_path, 2).notes[1]


@pytest.mark.unit
def test_nothing_compared(tmp_path: Path) -> None:
    assert judging.judge(tmp_path, 2) == judging.Proof(False, 0, 2)


def _prove(folder: Path, program: str) -> tuple[int, str]:
    (folder / "train.py").write_text(program)
    return bugs.command(["prove", "--json", "train.py"], folder)


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
    code, said = _prove(tmp_path, BUGS[name].program(trainer, is_clean=True))
    assert code == 0, said
    assert '"is_same": true' in said
    assert ("ranks draw their own noise" in said) == (trainer == "raw")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "what", "says"),
    [
        ("the network is called past its wrapper", "gradients", "they are not reduced"),
        ("the mean of a masked loss is over each rank's own entries", "loss", "a loss that is not a mean over samples"),
        ("the weights of a sampler are lost on several ranks", "samples", "ranks draw by DistributedSampler"),
    ],
)
def test_finds(tmp_path: Path, name: str, what: str, says: str) -> None:
    code, said = _prove(tmp_path, BUGS[name].program("raw"))
    assert code == 1, said
    parting = json.loads(said[said.index("{\n") :])["parting"]
    assert parting["what"] == what
    assert says in parting["meaning"]
    line = int(parting["place"].rpartition(":")[2])
    assert re.search(r"for x, y in|\.step\(|backward", (tmp_path / "train.py").read_text().splitlines()[line - 1])


@pytest.mark.launch
def test_nothing_to_compare(tmp_path: Path) -> None:
    code, said = _prove(tmp_path, "raise SystemExit('no data')\n")
    assert code == 2
    assert "in one process the trainer made no step, neither plainly nor as a single rank" in said
    assert said.rstrip().endswith("no data")
