"""The report: what ranks write down, that it changes nothing, the page, and in how many digits two runs agree."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import ddpshim
from ddpshim import __main__ as command_line
from ddpshim import checkpoint
from ddpshim.errors import RankError
from ddpshim.observe import digits, recording, records
from ddpshim.observe.report import figure, findings, load, markdown, verdict
from ddpshim.robomimic import calls as robomimic
from evidence.equivalence import VALIDATION, copy_release, largest_difference, make_config, make_data, train
from tests.ranks import run_ranks
from tests.robomimic import require

ROOT = Path(__file__).parents[2]
START = 1_000_000.0
NASTY = "</td><script>alert('x')</script> | `a` & \"b\""


def _put(folder: Path, rank: int, *found: dict[str, Any], torn: str = "") -> None:
    path = folder / "ddpshim" / f"rank_{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in found) + torn)


def _start(rank: int = 0, number: int = 1, world_size: int = 2, at: float = START, **facts: Any) -> dict[str, Any]:
    return {"kind": "start", "time": at, "start": number, "rank": rank, "world_size": world_size, **facts}


def _epoch(number: int, loss: float, phase: str = "training", **values: Any) -> dict[str, Any]:
    values = {"steps": 10, "seconds": {"data_wait": 0.1, "compute": 0.8, "optimizer": 0.1}, **values}
    return {"kind": "epoch", "time": START + 10, "epoch": number, "phase": phase, "own": {"Loss": loss}, **values}


def _end(how: str = "finished", **values: Any) -> dict[str, Any]:
    return {"kind": "end", "time": START + 20, "how": how, **values}


def _rollout(epoch: Any, success: float, environment: str = "Lift", **values: Any) -> dict[str, Any]:
    metrics = {"Success_Rate": success, "Return": 2.0}
    values = {"time": START + 12, "episodes": 10, "metrics": metrics, **values}
    return {"kind": "rollout", "epoch": epoch, "environment": environment, **values}


def _kept(kind: str, folder: Path) -> list[dict[str, Any]]:
    found = [record for path in records.files(folder).values() for record in records.read(path)[0]]
    return [record for record in found if record["kind"] == kind]


# A run


def test_two_ranks_their_mean_and_what_to_look_at(tmp_path: Path) -> None:
    guard = {"kind": "guard", "time": START, "passed": True}
    for rank, losses in enumerate(((4.0, 2.0), (2.0, 1.0))):
        epochs = [_epoch(i + 1, loss) for i, loss in enumerate(losses)]
        rollouts = [_rollout(1, 0.9, interval=[0.555, 0.998]), _rollout(None, 0.5, "B"), _rollout(2, 0.7)]
        valid = _epoch(2, 5.0 + rank, "validation")
        _put(tmp_path, rank, _start(rank), epochs[0], *rollouts, epochs[1], valid, guard, _end())
    run = load(tmp_path)
    assert run.losses("training") == {1: 3.0, 2: 1.5}
    assert run.losses("validation") == {2: 5.5}
    assert run.curves["rollout/Lift/Success_Rate"] == {1: 0.9, 2: 0.7}
    assert run.curves["rollout/B/Return"] == {1: 2.0}
    assert verdict(run) == "Finished: every rank completed the training"
    assert findings(run) == ["No guard failed (2 comparisons of weights and step counts)"]
    text = re.sub(" +", " ", markdown(run))
    assert "| 1 | 3 | | 4, 2 |" in text
    assert "| 1 | Lift | 10 | 90% (56% to 100%) | 2 |" in text
    assert "| 1 | 10 | 100.00 | 10% | 80% | 10% |" in text, "the epoch that warms up is left out"


def test_a_later_start_on_other_ranks_replaces_what_it_does_again(tmp_path: Path) -> None:
    for rank in (0, 1):
        _put(tmp_path, rank, _start(rank), _epoch(1, 1.0), _epoch(2, 2.0), _end("left", reason="SIGTERM on rank 1"))
    for rank in (0, 1, 2):
        _put(tmp_path, rank, _start(rank, 2, 4, START + 1000), _epoch(2, math.nan if rank else 8.0), _end())
    _put(tmp_path, 2, torn='{"kind": "epoch", "time": 1\n[1]\n{"kind": "ep')
    run = load(tmp_path)
    assert {epoch: sorted(ranks) for epoch, ranks in run.passes("training").items()} == {1: [0, 1], 2: [0, 1, 2]}
    assert run.losses("training")[1] == 1.0
    assert findings(run) == [
        "The records of rank 3 are missing: copy the files of all nodes into one folder",
        "2 lines of the records could not be read (killed while writing?)",
        "The loss is not finite from epoch 2 on",
        "The run was started 2 times, on 2, 4 ranks",
    ]


LOST = {"error": "Connection closed by peer", "lost_a_peer": True}
ENDS = [
    (
        (_end(), None),
        "rank 1 recorded no end (killed, or still running); the last record is from 1970-01-12 13:47:00 UTC",
    ),
    ((None, None), "ranks 0, 1 recorded no end"),
    ((_end("failed", first=0, **LOST), None), "rank 1 ended without an error message"),
    ((_end("failed", **LOST), _end("failed", error="ValueError: x", first=1)), "Failed: rank 1: ValueError: x"),
    ((_end("failed", error="stops", first=1), _end("failed", error="KeyError: 'a'", first=1)), "KeyError"),
    ((_end("left", reason="SIGTERM on rank 0", epoch=3, step=7), _end("left")), "saved at epoch 3, step 7"),
]


@pytest.mark.parametrize(("ends", "text"), ENDS)
def test_how_it_ended(tmp_path: Path, ends: Any, text: str) -> None:
    for rank, end in enumerate(ends):
        _put(tmp_path, rank, _start(rank), *([] if end is None else [end]))
    assert text in verdict(load(tmp_path))


def test_the_page_has_the_numbers_of_the_markdown_and_runs_no_text(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("plotly", reason="pip install plotly: it draws the page's charts")
    for rank in (0, 1):
        guard = {"kind": "guard", "time": START + 3, "said": NASTY, "passed": False}
        epochs = [_epoch(i, math.inf if i == 3 else 1.25 + i) for i in range(1, 6)]
        rollouts = [_rollout(1, 0.5, NASTY, interval=[0.2, 0.9]), _rollout(2, 0.6, NASTY)]
        failed = _end("failed", error=NASTY, first=rank)
        _put(tmp_path, rank, _start(rank, options={"logs": NASTY}), *epochs, guard, *rollouts, failed)
    assert command_line.main(["report", str(tmp_path)]) == 0
    assert command_line.main(["report", str(tmp_path), "--markdown"]) == 0
    written, _, printed = capsys.readouterr().out.partition("\n")
    assert written == str(tmp_path / "report.html")
    text = Path(written).read_text()
    assert printed in text
    assert html.escape(NASTY, quote=False).replace("|", "\\|") in printed
    assert NASTY not in text
    assert "<script" not in printed
    assert not re.search(r"<script[^>]* src=|<link", text), "it loads nothing"
    loss, success, *times = figure(load(tmp_path)).data
    assert [trace.name for trace in (loss, success)] == ["training", html.escape(NASTY)]
    assert list(loss.y[:2]) == [2.25, 3.25]
    assert success.error_y.array == pytest.approx([0.4, 0])
    assert success.error_y.arrayminus == pytest.approx([0.3, 0])
    assert {bars.name: list(bars.y) for bars in times} == {
        "data wait": [10.0] * 2, "compute": [80.0] * 2, "optimizer": [10.0] * 2
    }  # fmt: skip


def test_what_cannot_be_reported(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "b" / "2026"
    (tmp_path / "a" / "ddpshim").mkdir(parents=True)
    (tmp_path / "a" / "ddpshim" / "rank_0.jsonl").write_text("garbage\n[1]\n")
    assert command_line.main(["report", str(tmp_path)]) == 2
    _put(run, 0, _start(world_size=1))
    assert command_line.main(["report", str(tmp_path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "holds no records of a run" in first
    assert f"of 2 runs; one would hide the others. Name one: {tmp_path / 'a'}, {run}." in second
    assert {load(place).folder for place in (run.parent, run)} == {run}


# Two runs


def _train_plainly(folder: Path, seed: int, num_parts: int) -> None:
    with contextlib.closing(pytest.importorskip("tensorboardX").SummaryWriter(str(folder))) as writer:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        x = torch.randn(96, 8, generator=torch.Generator().manual_seed(7))
        y, optimizer = x.sum(1, keepdim=True).sin(), torch.optim.Adam(net.parameters(), 1e-2)
        for step in range(40):
            optimizer.zero_grad()
            parts = zip(x.chunk(num_parts), y.chunk(num_parts))
            loss = sum((nn.functional.mse_loss(net(a), b) for a, b in parts), torch.zeros(())) / num_parts
            loss.backward()
            optimizer.step()
            writer.add_scalar("train/loss", loss.item(), step)
            writer.add_scalar("train/step_time", seed + num_parts, step)


def test_a_plain_torch_trainer_s_two_tensorboard_folders(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    for name, seed, num_parts in (("a", 0, 1), ("b", 0, 3), ("seed", 1, 1)):
        _train_plainly(tmp_path / name / f"of {name}", seed, num_parts)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["report", "a", "b"]) == 0
    said, _, columns, _, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"a and b: the same experiment up to rounding \([567] digits\)", said)
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (columns, *rows)]
    assert cells[0] == ["quantity", "points", "first", "middle", "last", "differs from"]
    assert [row[:2] + row[5:] for row in cells[1:]] == [["train/loss", "40", ""], ["train/step_time", "40", "0"]]
    assert re.fullmatch("(all|7|6) at 0", cells[1][2])
    assert cells[1][4].endswith(" at 39")
    assert command_line.main(["report", "a", "seed", "b"]) == 1
    assert "a and seed: another experiment from 0 of train/loss on\n" in capsys.readouterr().out
    assert command_line.main(["report", "a", "empty"]) == 2
    assert "nothing in common: a has train/loss, train/step_time; empty has no numbers." in capsys.readouterr().err
    assert command_line.main(["report", "a", "absent"]) == 2
    assert "No such file or directory: 'absent'" in capsys.readouterr().err
    for name in ("tensorboard.compat.proto.event_pb2", "tensorboardX.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    assert command_line.main(["report", "a", "b"]) == 2
    assert "without tensorboard or tensorboardX. Run `pip install tensorboard`." in capsys.readouterr().err


def _curve(*values: float) -> dict[float, float]:
    return dict(enumerate(values, 1))


@pytest.mark.parametrize(
    ("one", "two", "shown", "since"),
    [
        (_curve(1, 2, 3), _curve(1, 2, 3), ["all", "all", "all"], None),
        (_curve(1.0, 1.0, 1.0, 1.0), _curve(1 + 2e-7, 1 + 3e-5, 1.003, 1.2), ["6", "4", "2", "0"], None),  # it grows
        (_curve(1.0, 1.0, 1.0), _curve(1.0, 1.0, 1.01), ["all", "all", "2"], 3),  # it jumps
        (_curve(1.0, 1.0), _curve(1 + 4.3e-7, 1 + 9e-4), ["6", "3"], None),  # an epoch of robomimic's example
        (_curve(1.0, 1.0), _curve(1 + 4.3e-7, 1 + 9e-3), ["6", "2"], 2),
        (_curve(1.0, 1.0), _curve(1.001, 1.00001), ["3", "5"], 1),
        (_curve(0.331, 0.0125), _curve(0.332, 0.0125), ["2", "all"], 1),  # four decimals were printed
        (_curve(2.3310, 2.0124), _curve(2.3311, 2.0125), ["4", "4"], None),
        (_curve(1.0, 1e-9, -1.0), _curve(1.0, -1e-9, -1.0), ["all", "8", "all"], None),  # it crosses zero
        (_curve(math.nan, math.inf, 1.0), _curve(math.nan, math.inf, math.nan), ["all", "all", "0"], 3),
        (_curve(0.0, 0.0), _curve(0.0, 0.5), ["all", "0"], 2),
    ],
)
def test_digits_and_where_rounding_does_not_explain_them(one: Any, two: Any, shown: Any, since: Any) -> None:
    found = digits.agreement("loss", one, two)
    assert [digits._shown(value) for value in found.digits.values()] == shown
    assert found.since == since


def test_time_and_episodes_are_not_judged(tmp_path: Path) -> None:
    rows = [
        {"epoch": i, "loss": 1 / i, "Time_Epoch": i, "is_best": True, "Timing": {"A": i}, "RAM_MB": i}
        for i in (1, 2, 3)
    ]
    (tmp_path / "log.txt").write_text("".join(json.dumps(row) + "\n" for row in rows) + "not JSON\n{torn")
    (tmp_path / "b.csv").write_text(
        "step,loss,Time_Epoch,note,RAM_MB,Timing/A\n1,1.0,7,x,9,9\n2,0.5,7,,9,9\n4,0.1,7,,9,9\n"
    )
    found, said = digits.compare(tmp_path / "log.txt", tmp_path / "b.csv")
    assert said == "the same experiment up to rounding (all digits)"
    assert {(row[0], row[1]) for row in digits.table(found)[1:]} == {
        (name, "2") for name in ("loss", "Time_Epoch", "Timing/A", "RAM_MB")
    }
    for name, rate in (("one", 0.8), ("two", 0.6)):
        _put(tmp_path / name, 0, _start(world_size=1), _epoch(3, 1.0), _rollout(3, rate), _end())
    found, said = digits.compare(tmp_path / "one", tmp_path / "two")
    assert said == "the same experiment up to rounding (all digits)"
    assert {each.name: each.since for each in found}["rollout/Lift/Success_Rate"] == 3


# Writing


@pytest.fixture
def closed() -> Any:
    yield
    records._close()


@pytest.mark.ranks
@pytest.mark.usefixtures("closed")
def test_records_are_appended_whole_and_not_by_a_fork(tmp_path: Path) -> None:
    records.note("lost")
    assert records.begin(tmp_path, 0, start=1, world_size=1)
    records.note("epoch", epoch=1, own={"Loss": 0.1})
    records.note("end", how="finished")
    records.note("lost")
    path = records.files(tmp_path)[0]
    with path.open("a") as file:
        file.write('{"kind": "epo')
    assert records.begin(tmp_path, 0, start=2, world_size=1)
    child = os.fork()
    if child == 0:
        records.note("epoch")
        records.note("end", how="finished")
        os._exit(0 if not records.is_on() else 1)
    assert os.waitpid(child, 0)[1] == 0
    records.note("mine")
    found, num_torn = records.read(path)
    assert ([record["kind"] for record in found], num_torn) == (["start", "epoch", "end", "start", "mine"], 1)
    assert (found[1]["own"], found[3]["start"]) == ({"Loss": 0.1}, 2)


@pytest.mark.parametrize("took", [5, OSError(28, "No space left on device"), None])
@pytest.mark.usefixtures("closed")
def test_a_full_disk_or_no_folder_ends_the_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], took: Any
) -> None:
    if took is None:
        (tmp_path / "ddpshim").write_text("a file")
    with ddpshim.record(tmp_path) as run:
        run.epoch(1, loss=1.0)
        write = Mock(side_effect=took if isinstance(took, OSError) else None, return_value=took)
        monkeypatch.setattr(records.os, "write", write)
        for epoch in (2, 3):
            run.epoch(epoch, loss=1.0)
        assert not records.is_on()
        monkeypatch.undo()
    said = capfd.readouterr().err
    assert said.count("training continues, but its report will be incomplete") == said.count("DDPSHIM_RECORD=no") == 1
    if took is not None:
        assert [*load(tmp_path).losses("training")] == [1]


def _train(folder: str, is_broken: bool = False) -> list[float]:
    torch.manual_seed(0)
    here, net = ddpshim.world(), nn.Linear(4, 1)
    wrapped = ddpshim.wrap_parallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    with ddpshim.record(folder) as run:
        for epoch in range(2):
            total = 0.0
            for x in ddpshim.make_loader(torch.arange(160.0).view(40, 4) / 160, batch_size=4, shuffle=True):
                if is_broken and here.rank == 1:
                    with torch.no_grad():
                        net.weight.add_(1)
                optimizer.zero_grad()
                loss = wrapped(x).square().mean()
                loss.backward()
                optimizer.step()
                total += loss.item()
            losses.append(total / 10)
            ddpshim.check_equal_steps()
            run.epoch(epoch, loss=losses[-1], valid=2 * losses[-1], lr=0.1)
            checkpoint.save({"net": net.state_dict()}, Path(folder, f"{epoch}.pth"))
    return losses


def test_the_option_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "world", lambda: ddpshim.World(options=ddpshim.Options(record=False)))
    assert len(_train(str(tmp_path))) == 2
    assert not (tmp_path / "ddpshim").exists()


def test_a_failure_is_written_down(tmp_path: Path) -> None:
    with pytest.raises(KeyError), ddpshim.record(tmp_path):
        raise KeyError("on purpose")
    assert verdict(load(tmp_path)) == "Failed: rank 0: KeyError: 'on purpose'"
    with pytest.raises(SystemExit), ddpshim.record(tmp_path):
        sys.exit(0)
    assert verdict(load(tmp_path)).startswith("Finished")


@pytest.mark.ranks
def test_each_rank_writes_its_own_file(tmp_path: Path) -> None:
    found = run_ranks(_train, 2, str(tmp_path))
    assert found[0] != found[1]
    run = load(tmp_path)
    for rank in (0, 1):
        rows = [rows[rank] for rows in run.passes("training").values()]
        assert [(row["own"], row["steps"]) for row in rows] == [({"Loss": loss, "lr": 0.1}, 10) for loss in found[rank]]
        assert all(row["seconds"]["compute"] > 0 and row["memory"]["rss"] > 50e6 for row in rows)
    assert [*run.losses("training").values()] == [pytest.approx((a + b) / 2) for a, b in zip(*found)]
    assert [*run.losses("validation").values()] == [2 * loss for loss in run.losses("training").values()]
    saves = _kept("checkpoint", tmp_path)
    assert [(Path(save["path"]).name, 0 < save["seconds"] < 600) for save in saves] == [
        ("0.pth", True),
        ("1.pth", True),
    ]
    assert verdict(run).startswith("Finished")
    assert findings(run) == ["No guard failed (10 comparisons of weights and step counts)"]


@pytest.mark.ranks
def test_a_guards_word_is_in_the_records(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="SyncError"):
        run_ranks(_train, 2, str(tmp_path), True)
    assert findings(load(tmp_path))[0].startswith("A guard failed: after 1 backward passes of Linear ranks hold")
    assert "SyncError" in verdict(load(tmp_path))


def test_evaluations_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = {"Lift": {"Return": 1.5, "Success_Rate": 0.25, "Time_Episode": 3.0, "video": "a.mp4"}}
    logs |= {"none": {"Success_Rate": -1}, "part": {"Success_Rate": 0.3}}
    monkeypatch.setattr(robomimic.rollout, "rollout_with_stats", lambda **options: (logs, {}, {}))
    with ddpshim.record(tmp_path):
        assert robomimic.rollout_with_stats(epoch=3, num_episodes=8, envs={}) == (logs, {})
    found = load(tmp_path).evaluations
    assert [(at, record["metrics"], record["episodes"]) for at, record in found.items()] == [
        ((3, "Lift"), {"Return": 1.5, "Success_Rate": 0.25, "Time_Episode": 3.0}, 8),
        ((3, "none"), {}, 8),
        ((3, "part"), {"Success_Rate": 0.3}, 8),
    ]
    assert found[3, "Lift"]["interval"] == pytest.approx([0.0319, 0.6509], abs=1e-4)
    assert [found[3, where]["interval"] for where in ("none", "part")] == [None, None]


# The real trainer


def _train_robomimic(releases: Path, folder: Path, **how: Any) -> Any:
    require("0.3.0")
    folder.mkdir(exist_ok=True)
    tree = copy_release("0.3.0", releases, "unedited")
    config = make_config(
        tree, "bc", make_data(folder, num_demos=50), folder, 10, 2, experiment__save__every_n_epochs=1, **VALIDATION
    )
    return train(tree, config, folder / "run", 2, forked=True, **how)


@pytest.mark.launch
@pytest.mark.robomimic
def test_the_report_of_robomimic_has_the_numbers_of_its_log(releases: Path, tmp_path: Path) -> None:
    trained = _train_robomimic(releases, tmp_path)
    run = load(trained.folder / "out")
    assert (run.folder / "config.json").exists()
    assert [*run.losses("training").values()] == trained.losses()
    assert [*run.losses("validation").values()] == trained.losses("Validation")
    for epoch, rows in run.passes("training").items():
        assert [rows[rank]["own"]["Loss"] for rank in (0, 1)] == [run.losses("training")[epoch]] * 2
        assert [rows[rank]["steps"] for rank in (0, 1)] == [10, 10]
    assert verdict(run).startswith("Finished")
    paths = [Path(record["path"]).name for record in _kept("checkpoint", run.folder)]
    assert paths == [f"model_epoch_{n}.pth" for n in (1, 2)]
    assert sum(record["passed"] for record in _kept("guard", run.folder)) == 10
    without = _train_robomimic(releases, tmp_path / "off", environ={"DDPSHIM_RECORD": "no"})
    assert not list(without.folder.glob("out/**/rank_*.jsonl"))
    assert len(trained.observed) == len(without.observed) == 2
    for one, other in zip(trained.observed, without.observed):
        assert largest_difference(one["networks"], other["networks"]) == 0
    assert trained.losses() == without.losses()


def test_the_example_of_the_docs_and_the_example_trainer_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "check.md").read_text(), re.DOTALL)[-1]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/check.md", "exec"), {})
    assert load(tmp_path / "out" / "run").losses("validation") == pytest.approx({1: 0.5, 2: 0.25, 3: 1 / 6})
    runpy.run_path(str(ROOT / "examples" / "recorded_run.py"))["main"](str(tmp_path / "recorded"))
    losses = [*load(tmp_path / "recorded").losses("training").values()]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 4
