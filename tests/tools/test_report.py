"""The report: what ranks write down, that it changes nothing, and that the page says what was written."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
import runpy
import sys
import time
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ddpshim
from ddpshim import __main__ as command_line
from ddpshim import checkpoint
from ddpshim.errors import RankError, ReportError, SyncError
from ddpshim.observe import exporting, recording, records
from ddpshim.observe.report import page as page_of_report
from ddpshim.observe.report.charts import charts
from ddpshim.observe.report.comparing import named, verdicts
from ddpshim.observe.report.findings import findings, verdict
from ddpshim.observe.report.results import evaluations
from ddpshim.observe.report.run import Run, load, load_all
from ddpshim.observe.report.tables import Table, headline, tables
from ddpshim.observe.report.writing import markdown, write
from ddpshim.robomimic import calls as robomimic
from evidence.equivalence import copy_release, largest_difference, make_config, make_data, source, train
from tests import browser
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
START = 1_000_000.0


def _put(folder: Path, rank: int, *found: dict[str, Any], torn: str = "") -> None:
    path = folder / "ddpshim" / f"rank_{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in found) + torn)


def _start(rank: int = 0, number: int = 1, world_size: int = 2, at: float = START, **facts: Any) -> dict[str, Any]:
    facts = {"backend": "gloo", "device": "cpu", "options": {}, **facts}
    return {"kind": "start", "time": at, "start": number, "rank": rank, "world_size": world_size, **facts}


def _epoch(number: int, loss: float, at: float = START + 10, phase: str = "training", **values: Any) -> dict[str, Any]:
    seconds = {"data_wait": 0.1, "compute": 0.8, "optimizer": 0.05, "communication": 0.05, "other": 0.0}
    values = {"steps": 10, "samples": 100, "seconds": seconds, "mean": None, "memory": {"rss": 1e8}, **values}
    return {"kind": "epoch", "time": at, "epoch": number, "phase": phase, "own": {"Loss": loss}, **values}


def _end(how: str = "finished", at: float = START + 20, **values: Any) -> dict[str, Any]:
    return {"kind": "end", "time": at, "how": how, **values}


def _rollout(epoch: Any, success: float, environment: str = "Lift", mean: float = 0.0, **values: Any) -> dict[str, Any]:
    metrics = {"Success_Rate": success, "Return": mean}
    values = {"time": START + 12, "episodes": 10, "seconds": 3.0, **values}
    return {"kind": "rollout", "epoch": epoch, "environment": environment, "metrics": metrics, **values}


def _said(run: Run, level: Optional[str] = None) -> str:
    return "\n".join(text for found, text in findings(run) if level in (None, found))


def _table(run: Run, name: str) -> Table:
    return next(table for table in tables(run) if table.name == name)


def _cells(run: Run, name: str) -> list[list[str]]:
    return _table(run, name).rows


# Reading


def test_two_ranks_and_their_mean(tmp_path: Path) -> None:
    for rank, losses in enumerate(((4.0, 2.0), (2.0, 1.0))):
        epochs = [_epoch(i + 1, loss) for i, loss in enumerate(losses)]
        _put(tmp_path, rank, _start(rank), *epochs, _epoch(2, 5.0 + rank, phase="validation"), _end())
    run = load(tmp_path)
    assert [(epoch.mean, epoch.valid) for epoch in run.epochs] == [(3.0, None), (1.5, 5.5)]
    assert _cells(run, "loss") == [["1", "10", "3 (2 to 4)", ""], ["2", "10", "1.5 (1 to 2)", "5.5"]]
    assert dict(headline(run))["samples seen"] == "400"
    assert verdict(run) == ("good", "Finished: every rank completed the training")
    _put(tmp_path / "logged", 0, _start(world_size=1), _epoch(1, 4.0, mean={"Loss": 7.0}), _end())
    assert load(tmp_path / "logged").epochs[0].mean == 7.0, "the trainer's own mean counts"


def test_a_later_start_on_other_ranks_replaces_what_it_does_again(tmp_path: Path) -> None:
    for rank in (0, 1):
        _put(tmp_path, rank, _start(rank), _epoch(1, 1.0), _epoch(2, 2.0), _end("left", reason="SIGTERM on rank 1"))
    later = START + 1000
    for rank in (0, 1, 2, 3):
        again = _epoch(2, 8.0, later + 5, steps=4, samples=20, first_step=6)
        _put(tmp_path, rank, _start(rank, 2, 4, later), again, _end(at=later + 10))
    run = load(tmp_path)
    assert [sorted(epoch.training) for epoch in run.epochs] == [[0, 1], [0, 1, 2, 3]]
    assert [(epoch.mean, epoch.steps, epoch.samples) for epoch in run.epochs] == [(1.0, 10, 200), (8.0, 10, 200)]
    assert run.wall_s == pytest.approx(20 + 10), "the time between two starts is nobody's"
    assert "The run was started 2 times, on 2, 4 ranks" in _said(run)
    last = later + 1000
    _put(tmp_path, 0, _start(0, 3, 1, last), _epoch(2, 3.0, last + 5), _end(at=last + 10))
    assert [(sorted(epoch.training), epoch.mean) for epoch in load(tmp_path).epochs] == [([0, 1], 1.0), ([0], 3.0)]
    assert [row[-1] for row in _cells(run, "starts")] == ["saved and left (SIGTERM on rank 1)", "finished"]


def test_a_torn_line_and_a_missing_rank_are_told(tmp_path: Path) -> None:
    _put(tmp_path, 1, _start(1), _epoch(1, 3.0), torn='{"kind": "epoch", "time": 1')
    run = load(tmp_path)
    assert run.num_torn == 1
    assert run.epochs[0].mean == 3.0
    assert "1 line of the records could not be read" in _said(run, "note")
    assert "In start 1 the records of rank 0 are missing" in _said(run, "bad")
    assert _cells(run, "starts")[0][2] == "2 (1 missing)"


LOST = {"error": "Connection closed by peer", "lost_a_peer": True}
ENDS = [
    ((_end(), None), "bad", "rank 1 of 2 never recorded its end"),
    ((None, None), "bad", "No rank recorded its end"),
    ((_end("failed", first=0, **LOST), None), "bad", "rank 1 ended without an error message"),
    ((_end("failed", **LOST), _end("failed", error="ValueError: x", first=1)), "bad", "rank 1: V"),
    ((_end("stopped", error="stops", first=1), _end("failed", error="KeyError: 'a'", first=1)), "bad", "KeyError"),
    ((_end("left", reason="SIGTERM on rank 0", epoch=3, step=7), _end("left")), "note", "saved at epoch 3, step 7"),
]


@pytest.mark.parametrize(("ends", "level", "text"), ENDS)
def test_how_it_ended(tmp_path: Path, ends: Any, level: str, text: str) -> None:
    for rank, end in enumerate(ends):
        _put(tmp_path, rank, _start(rank), *([] if end is None else [end]))
    found = verdict(load(tmp_path))
    assert found.level == level
    assert text in found.text


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    now = time.time()
    progress = {"kind": "progress", "time": now, "steps": 40, "loss": 0.5}
    _put(tmp_path, 0, _start(world_size=1, at=now - 5), _epoch(1, 1.0, now - 1), progress)
    run = load(tmp_path)
    assert verdict(run).text.startswith("Still running")
    assert "After the last complete epoch 40 more steps were recorded, loss 0.5" in _said(run)


def _two(folder: Path, change: Callable[[int, dict[str, Any]], Any]) -> Run:
    for rank in (0, 1):
        epochs = [_epoch(i + 1, 2.0 + rank + 0.1 * i, at=START + i + 1) for i in range(3)]
        for epoch in epochs[1:]:  # the first warms up
            epoch["seconds"] = dict(epoch["seconds"])
            change(rank, epoch)
        _put(folder, rank, _start(rank), *epochs, _end())
    return load(folder)


def test_what_takes_time_is_named(tmp_path: Path) -> None:
    run = _two(tmp_path / "data", lambda rank, epoch: epoch["seconds"].update(data_wait=0.43, compute=0.47))
    assert "Data wait is 43% of the training time on every rank: raise num_workers" in _said(run, "bad")
    assert [row[4] for row in _cells(run, "time")] == ["43%", "43%"]
    run = _two(tmp_path / "rank", lambda rank, epoch: epoch["seconds"].update(compute=0.85 + 0.4 * rank))
    assert "Rank 1 is 1.4 times slower than rank 0 (140.0 ms against 100.0 ms of its own work a step)" in _said(run)


def test_equal_losses_and_losses_that_are_no_numbers(tmp_path: Path) -> None:
    run = _two(tmp_path / "same", lambda rank, epoch: epoch["own"].update(Loss=1.0))
    assert "exactly the same" not in _said(run), "the first epoch differs"
    for rank in (0, 1):
        _put(tmp_path / "equal", rank, _start(rank), _epoch(1, 1.0), _end())
        _put(tmp_path / "odd", rank, _start(rank), _epoch(1, 1.0), _epoch(2, math.nan if rank else 1.0), _end())
    assert "All ranks report exactly the same losses" in _said(load(tmp_path / "equal"), "note")
    assert "The loss is not finite from epoch 2 on (rank 1)" in _said(load(tmp_path / "odd"), "bad")
    assert "nan" in _page(tmp_path / "odd")


def test_a_guard_that_failed_is_told_first(tmp_path: Path) -> None:
    guard = {"kind": "guard", "time": START + 3, "check": "weights", "network": "Net", "reductions": 1}
    for rank in (0, 1):
        good, bad = {**guard, "passed": True}, {**guard, "passed": False, "said": "ranks hold <other> weights"}
        _put(tmp_path, rank, _start(rank), _epoch(1, 1.0 + rank), good, bad, _end("failed", error="SyncError", first=0))
    run = load(tmp_path)
    assert findings(run)[0].text == "A guard failed on rank 0: ranks hold <other> weights"
    assert _cells(run, "guards")[0][2:4] == ["2", "2"]
    page = _page(tmp_path)
    assert "&lt;other&gt;" in page
    assert "<other>" not in page


def test_checkpoints_and_the_memory_of_ranks(tmp_path: Path) -> None:
    saved = {"kind": "checkpoint", "time": START + 9, "path": str(tmp_path / "models" / "a.pth"), "bytes": 2_500_000}
    full = {"rss": 9e9, "gpu_allocated": 8e10, "gpu_reserved": 9.5e10, "gpu_total": 1e11, "gpu_use": 61.0}
    _put(tmp_path, 0, _start(world_size=1), _epoch(1, 1.0, memory=full), {**saved, "seconds": 6.0}, _end())
    run = load(tmp_path)
    assert _cells(run, "checkpoints") == [["1", "9.0 s", "models/a.pth", "2.5 MB", "6000 ms", "at once"]]
    assert _table(run, "checkpoints").note == "Training waited 6.0 s for them, 30% of the run."
    assert _cells(run, "time")[0][-3:] == ["9.0 GB", "61%", "95.0 GB of 100.0 GB"]


TWICE = "On {} ranks of this kind, a step of the same global batch would take at least about {} ms in place of 100.0 ms"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"local_world_size": 2, "cores": 2}, TWICE.format(4, "55.0")),  # compute 80 ms and data wait 10 ms halve
        ({"device": "cuda:0", "backend": "nccl"}, TWICE.format(4, "55.0")),
        ({"world_size": 1}, TWICE.format(2, "55.0") + ", without communication"),
        ({"local_world_size": 2, "cores": 1}, ""),  # they shared a core
        ({"device": "cuda:0"}, ""),  # and over gloo perhaps a GPU
        ({"backend": "nccl", "options": {"per_rank_batch": True}}, ""),
    ],
)
def test_a_step_on_twice_as_many_ranks(tmp_path: Path, facts: dict[str, Any], expected: str) -> None:
    for rank in range(facts.get("world_size", 2)):
        _put(tmp_path, rank, _start(rank, **facts), _epoch(1, 1.0), _end())
    note = _table(load(tmp_path), "time").note
    assert expected in note
    assert ("On " in note) == bool(expected)


# The file


def _page(folder: Path) -> str:
    pytest.importorskip("plotly", reason="pip install plotly: it draws the page's charts")
    assert command_line.main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text()


NASTY = "</td><script>alert('x')</script> | `a` & \"b\""


def test_the_page_is_one_file_that_loads_nothing_and_runs_only_its_own(tmp_path: Path, capsys: Any) -> None:
    for rank in (0, 1):
        _put(
            tmp_path,
            rank,
            _start(rank, options={"logs": NASTY}, environment={"versions": {"torch": NASTY}}),
            *[_epoch(i, 1.0 + i + rank, own={"Loss": 1.0 + i + rank, NASTY: i}) for i in range(1, 6)],
            _epoch(5, 2.0, phase="validation"),
            {"kind": "guard", "time": START + 3, "check": "weights", "network": NASTY, "reductions": 1, "passed": True},
            {"kind": "checkpoint", "time": START + 4, "path": f"/{NASTY}", "bytes": 1, "seconds": 0.0},
            _rollout(1, 0.5, NASTY),
            _end("failed", error=NASTY, first=rank),
        )
    page = _page(tmp_path)
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert "script-src " + " ".join(f"'sha256-{each}'" for each in hashes) + ";" in page
    assert "default-src 'none'" in page
    library, own = scripts
    assert library == page_of_report.plotly_js()
    page = page.replace(library, "").replace(own, "")
    assert html.escape(NASTY) in page
    assert NASTY not in page
    assert "alert('x')</script>" not in page
    assert not re.search(r"(?:src|href)=\"|@import|url\(|https?:", page)
    figures = json.loads(re.findall(r'id="figures">(.*?)</script>', page, re.DOTALL)[0])
    assert [*figures] == re.findall(r'<div id="(\w+)" class="chart"', page) == ["success", "losses"]
    for variable in set(re.findall(r"var\(--(\w+)\)", page)) - {"level"}:
        assert page.count(f"--{variable}:") >= 2, f"{variable} in light and dark"
    assert page.count("<tr>") == page.count("</tr>") > 10


def test_charts_are_what_plotly_draws(tmp_path: Path) -> None:
    graphs = pytest.importorskip("plotly.graph_objects", reason="pip install plotly")
    for name, losses in (("a", [math.inf, 2.0, math.nan]), ("b", [3.0])):
        epochs = [_epoch(i, loss, mean={"Loss": loss, "L1": loss}) for i, loss in enumerate(losses)]
        epochs[0]["curve"] = [4.0, 2.0]
        _put(tmp_path / name, 0, _start(), *epochs, _rollout(1, 0.5), _end())
        _put(tmp_path / name, 1, _start(1), *epochs, _epoch(0, 2.0, phase="validation"))
    runs = {name: load(tmp_path / name) for name in ("a", "b")}
    drawn = [*charts(runs), *charts({"": runs["a"]})]
    assert [chart.name for chart in drawn] == ["success", "losses"] * 2
    for chart in drawn:
        graphs.Figure(chart.figure)
        json.dumps(page_of_report._finite(chart.figure), allow_nan=False)
    success = drawn[2].figure["data"][0]
    assert (success["x"], success["y"], success["customdata"]) == ([1], [0.5], ["50% (19% to 81%)"])
    assert [success["error_y"][side][0] for side in ("arrayminus", "array")] == pytest.approx(
        [0.3129, 0.3129], abs=1e-4
    )


def test_success_and_return_come_with_intervals(tmp_path: Path) -> None:
    played = {"interval": [0.3, 0.9], "returns": [1.0, 2.0, 3.0]}
    rollouts = [_rollout(10, 0.0), _rollout(20, 0.9), _rollout(20, 0.9, mean=2.0, **played), _rollout(None, -1, "B")]
    _put(tmp_path, 0, _start(), _epoch(1, 1.0), *rollouts, _end())
    _put(tmp_path, 1, _start(1), _epoch(1, 1.0), *rollouts, _end())
    run = load(tmp_path)
    first, _, _ = found = evaluations(load(tmp_path))
    assert [(each.epoch, each.environment) for each in found] == [(1, "B"), (10, "Lift"), (20, "Lift")]
    assert first.success is None, "-1: no episode was played"
    assert _cells(run, "success")[1:] == [
        ["10", "Lift", "10", "0% (0% to 31%)", "0", "3.0 s"],
        ["20", "Lift", "10", "90% (30% to 90%)", "2 (-0.4841 to 4.484)", "3.0 s"],
    ]
    assert dict(headline(run))["best success rate in Lift"] == "90% (epoch 20)"


def test_runs_are_compared(tmp_path: Path, capsys: Any) -> None:
    for name, num_ranks, lr in (("one", 1, 0.1), ("four", 4, 0.2)):
        for rank in range(num_ranks):
            seconds = {"compute": 1.0 if num_ranks == 1 else 0.4}
            epochs = [_epoch(i, 2.0 / i, seconds=seconds, samples=100 / num_ranks) for i in (1, 2, 3)]
            written = (_start(rank, world_size=num_ranks), *epochs, _rollout(3, 0.8), _end())
            _put(tmp_path / name / "2026", rank, *written)
        (tmp_path / name / "2026" / "config.json").write_text(json.dumps({"train": {"lr": lr, "batch": 8}}))
    out = tmp_path / "c.md"
    folders = [str(tmp_path / name) for name in ("one", "four")]
    assert command_line.main(["report", *folders, "--markdown", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    rows = {name: of_runs for name, *of_runs in _table_of(out, "Final values")}
    assert rows["what"] == ["one", "four"]
    assert rows["samples/s"] == ["100", "250"]
    assert rows["speed-up"] == ["1.00", "2.50"]
    assert rows["last success rate"] == ["80% (44% to 97%)"] * 2
    assert rows["digits of the loss that agree"] == ["", "all"]
    assert ["config.train.lr", "0.1", "0.2"] in _table_of(out, "What differs")
    assert not any("batch" in row[0] for row in _table_of(out, "What differs"))
    assert command_line.main(["report", folders[0], folders[0], "--markdown"]) == 2
    assert "hold the same run" in capsys.readouterr().err
    pytest.importorskip("plotly", reason="pip install plotly: it draws the page's charts")
    assert command_line.main(["report", *folders, "--out", str(tmp_path / "c.html")]) == 0
    page = (tmp_path / "c.html").read_text()
    assert "<title>one against four: report</title>" in page
    said = (
        "four: Against one: losses agree in these digits: all; success 80% (44% to 97%) against 80% (44% to 97%), the "
        "intervals overlap; 2.50 times as fast."
    )
    assert f"- **{said}**" in out.read_text()
    assert page.index(said) < page.index("<h2>Final values") < page.index("<h2>Digits that agree")
    assert "<details" not in page, "a part is hidden"
    again = Run(tmp_path / "four" / "2027", [], 0)
    assert [*named([again, load(tmp_path / "one")])] == ["four", "one"]
    assert [*named([again, load(tmp_path / "four")])] == ["four/2027", "four/2026"]


LOG = """
ObservationKeyToModalityDict: action not found
Train Epoch 0 in words of a dataset
100%|##########| 30/30 [00:01<00:00, 26.31it/s]
Train Epoch 1
{
    "L2_Loss": 0.5,
    "Loss": 0.5
}
Validation Epoch 1
{
    "Loss": NaN
}

Epoch 1 Memory Usage: 416 MB

Train Epoch 2
{
    "Loss": 0.25,
    "Optimizer/policy0_lr": 0.001
}

Epoch 2 Rollouts took 1.5s (avg) with results:
Env: Lift
{
    "Return": 2.0,
    "Success_Rate": 0.5,
    "time": 1.5
}
Train Epoch 3
{
    "Loss": 0.1,
"""


def test_a_plain_run_in_one_process_is_compared_from_its_own_log(tmp_path: Path, capsys: Any) -> None:
    plain = tmp_path / "plain" / "2026"
    (plain / "logs").mkdir(parents=True)
    (plain / "logs" / "log.txt").write_text(LOG)
    (plain / "config.json").write_text('{"seed": 1}')
    for rank in (0, 1):
        epochs = [_epoch(number, 9.0, mean={"Loss": loss}) for number, loss in ((1, 0.5), (2, 0.25 * (1 + 3e-7)))]
        valid = _epoch(1, math.nan, phase="validation")
        _put(tmp_path / "two" / "2026", rank, _start(rank, seed=1), *epochs, valid, _rollout(2, 0.5, mean=1.0), _end())
    (tmp_path / "two" / "2026" / "config.json").write_text('{"seed": 2}')
    out, folders = tmp_path / "c.md", [str(tmp_path / name) for name in ("plain", "two")]
    assert command_line.main(["report", *folders, "--markdown", "--out", str(out)]) == 0
    assert _table_of(out, "Digits that agree") == [
        ["epoch", "value", "digits", "plain", "two"],
        ["1", "loss", "all", "0.5", "0.5"],
        ["1", "validation", "all", "nan", "nan"],
        ["2", "loss", "6", "0.25", "0.250000075"],
        ["2", "success rate in Lift", "all", "0.5", "0.5"],
        ["2", "return in Lift", "0", "2", "1"],
    ]
    rows = {name: of_runs for name, *of_runs in _table_of(out, "Final values")}
    assert (rows["ranks"], rows["digits of the loss that agree"]) == (["1", "2"], ["", "all in epoch 1, 6 in epoch 2"])
    assert rows["last success rate"] == ["50%", "50% (19% to 81%)"]
    assert _table_of(out, "What differs")[1:] == [["config.seed", "1", "2"]]
    assert "- **plain: One process, no records of ddpshim: 2 epochs, from the log of its trainer.**" in out.read_text()
    capsys.readouterr()
    assert command_line.main(["report", str(plain)]) == 2
    assert f"Compare it with a recorded run: python -m ddpshim report {plain} RUN_DIR." in capsys.readouterr().err
    (plain / "logs" / "log.txt").write_text(LOG.replace("100%|", "ddpshim: global batch 100 = 2 ranks x 50\n"))
    with pytest.raises(ReportError, match="holds no records"):
        load_all(folders)


@pytest.mark.parametrize(
    ("loss", "success", "level", "text"),
    [
        (1.0, 0.1, "good", "all; success 10% (0% to 45%) against 10% (0% to 45%), the intervals overlap"),
        (1.02, 0.1, "note", "agree in these digits: 1 in epoch 1;"),
        (1.0, 0.9, "note", "success 90% (55% to 100%) against 10% (0% to 45%), the intervals do not overlap"),
    ],
)
def test_the_verdict_of_a_comparison(tmp_path: Path, loss: float, success: float, level: str, text: str) -> None:
    for name, *of in (("one", 1.0, 0.1), ("two", loss, success)):
        _put(tmp_path / name, 0, _start(world_size=1), _epoch(1, of[0]), _rollout(1, of[1]), _end())
    ((name, found),) = verdicts({name: load(tmp_path / name) for name in ("one", "two")})
    assert (name, found.level) == ("two", level)
    assert text in found.text


def _table_of(page: Path, title: str) -> list[list[str]]:
    text = page.read_text().split(f"## {title}\n\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.replace("\\", "").split("|")[1:-1]] for line in text.splitlines()]
    return [rows[0], *rows[2:]]


@pytest.mark.launch
def test_the_page_can_be_read_in_a_browser(tmp_path: Path) -> None:
    if browser.find() is None:
        pytest.skip(browser.NO_BROWSER)
    pytest.importorskip("plotly", reason="pip install plotly: it draws the page's charts")
    for rank in range(4):
        epochs = [_epoch(i, 2.0 / i + 0.1 * rank) for i in range(1, 31)]
        rollouts = [_rollout(i, i / 30, "PickPlaceCan_D1") for i in (10, 20, 30)]
        failed = _end("failed", error="a_long_word_without_a_break" * 9, first=rank)
        _put(tmp_path / "can_image_diffusion_policy_with_a_long_name", rank, _start(rank), *epochs, *rollouts, failed)
    page = write([tmp_path])
    names = ["report_1280", "report_1280_dark", "report_400", "report_400_dark"]
    assert browser.look(page) == {key: [] for key in names}


def test_curves_go_to_tensorboard(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: Any = None) -> None:
            self.name = str(Path(folder).relative_to(tmp_path / "out"))

        def add_scalar(self, name: str, value: float, epoch: int, walltime: float) -> None:
            written.append((self.name, name, value, epoch))

        def flush(self) -> None: ...

        def close(self) -> None:
            written.append((self.name, "end", 0, 0))

    monkeypatch.setattr(exporting, "_summary_writer", lambda: Writer)
    monkeypatch.setattr(exporting, "check", lambda kind: (kind,))
    for rank in (0, 1):
        valid = _epoch(1, 5.0 + rank, phase="validation")
        _put(tmp_path / "run", rank, _start(rank), _epoch(1, 1.0 + rank), valid, _rollout(1, 0.8), _end())
    argv = ["report", str(tmp_path / "run"), "--export", "tensorboard", "--out", str(tmp_path / "out")]
    assert command_line.main(argv) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'tensorboard'}\n"
    losses = {(place, name): value for place, name, value, _ in written if name.endswith("Loss")}
    places = ("tensorboard", "tensorboard/rank_0", "tensorboard/rank_1")
    assert losses == {
        **{(place, "training/Loss"): loss for place, loss in zip(places, (1.5, 1.0, 2.0))},
        **{(place, "validation/Loss"): loss for place, loss in zip(places, (5.5, 5.0, 6.0))},
    }
    assert ("tensorboard", "rollout/Lift/Success_Rate", 0.8, 1) in written
    assert [row[0] for row in written[-3:]] == [*places]
    assert not (tmp_path / "run" / "report.html").exists()


def test_markdown_has_the_same_numbers(tmp_path: Path, capsys: Any) -> None:
    for rank in (0, 1):
        _put(tmp_path, rank, _start(rank), _epoch(1, 1.25 + rank), _end("failed", error=NASTY, first=0))
    out = tmp_path / "sum mary.md"
    assert command_line.main(["report", "--markdown", "--out", str(out), str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    text = out.read_text()
    assert text == markdown([load(tmp_path)])
    assert command_line.main(["report", "--markdown", str(tmp_path)]) == 0
    assert capsys.readouterr().out == text
    assert "| 1 | 10 | 1.75 (1.25 to 2.25) |" in text
    assert "<script" not in text
    page = html.unescape(_page(tmp_path))
    for table in tables(load(tmp_path)):
        for cell in (cell for row in table.rows for cell in row):
            assert f">{cell}</td>" in page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ddpshim", "report.html", "sum mary.md"]


def test_what_cannot_be_reported(tmp_path: Path, capsys: Any) -> None:
    assert command_line.main(["report", str(tmp_path / "nowhere")]) == 2
    assert command_line.main(["report", str(tmp_path)]) == 2
    (tmp_path / "a" / "ddpshim").mkdir(parents=True)
    (tmp_path / "a" / "ddpshim" / "rank_0.jsonl").write_text("garbage\n[1]\n")
    assert command_line.main(["report", str(tmp_path)]) == 2
    _put(tmp_path / "b", 0, _start(world_size=1))
    assert command_line.main(["report", str(tmp_path)]) == 2
    assert command_line.main(["report", "--markdown", str(tmp_path / "b"), "--out", str(tmp_path / "no" / "x.md")]) == 2
    said = capsys.readouterr().err.splitlines()
    for line, text in zip(said, ("is not a folder", "holds no records", "hold no start", "of 2 runs", "cannot be wr")):
        assert text in line
    assert len(said) == 5


def test_a_run_is_found_from_above_and_from_its_logs(tmp_path: Path) -> None:
    run = tmp_path / "bc" / "20260101"
    _put(run, 0, _start(world_size=1))
    (run / "logs").mkdir()
    assert {load(place).folder for place in (tmp_path, run.parent, run, run / "logs", run / "ddpshim")} == {run}


def test_without_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _put(tmp_path, 0, _start(world_size=1), _epoch(1, 1.0))
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ReportError, match=r"no charts\. Install it with `pip install ddpshim\[report\]`"):
        write([tmp_path])
    assert command_line.main(["report", str(tmp_path)]) == 0, "the line at the end of a run names this command"
    out, err = capsys.readouterr()
    assert out == markdown([load(tmp_path)])
    assert (
        err == "ddpshim: plotly is not installed, so this is the report without charts; pip install plotly adds them\n"
    )
    assert write([tmp_path], tmp_path / "report.md", as_markdown=True).exists()
    assert not (tmp_path / "report.html").exists()


# Writing


@pytest.fixture
def closed() -> Any:
    yield
    records._close()


@pytest.mark.usefixtures("closed")
def test_records_are_appended_whole(tmp_path: Path) -> None:
    assert not records.is_on()
    records.note("lost")
    assert records.begin(tmp_path, 0, start=1, world_size=1)
    records.note("epoch", epoch=1, own={"Loss": 0.1})
    records.end("finished")
    records.note("lost")
    path = records.files(tmp_path)[0]
    with path.open("a") as file:
        file.write('{"kind": "epo')
    assert records.begin(tmp_path, 0, start=records.num_starts(tmp_path) + 1, world_size=1)
    found, num_torn, is_begun = records.read(path)
    assert [(record["kind"], record.get("start")) for record in found] == [
        ("start", 1),
        ("epoch", None),
        ("end", None),
        ("start", 2),
    ]
    assert (num_torn, is_begun) == (1, False)
    assert found[1]["own"] == {"Loss": 0.1}


@pytest.mark.ranks
@pytest.mark.usefixtures("closed")
def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    records.begin(tmp_path, 0, start=1)
    child = os.fork()
    if child == 0:
        records.note("epoch")
        records.end("finished")
        os._exit(0 if not records.is_on() else 1)
    assert os.waitpid(child, 0)[1] == 0
    records.note("mine")
    assert [record["kind"] for record in records.read(records.files(tmp_path)[0]).records] == ["start", "mine"]


@pytest.mark.parametrize("took", [5, OSError(28, "No space left on device")])
@pytest.mark.usefixtures("closed")
def test_a_full_disk_ends_the_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], took: Any
) -> None:
    def full(file: int, data: bytes) -> int:
        if isinstance(took, OSError):
            raise took
        return int(took)

    with ddpshim.record(tmp_path) as run:
        run.epoch(1, loss=1.0)
        monkeypatch.setattr(records.os, "write", full)
        for epoch in (2, 3):
            run.epoch(epoch, loss=1.0)
            run.step(1.0)
        assert not records.is_on()
        monkeypatch.undo()
    assert capfd.readouterr().err.count("training continues, but its report will be incomplete") == 1
    assert [e.number for e in load(tmp_path).epochs] == [1]


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ddpshim").write_text("a file")
    with ddpshim.record(tmp_path) as run:
        run.epoch(1, loss=1.0)
    said = capfd.readouterr().err
    assert said.count("cannot be written") == 1
    assert "training continues" in said
    assert "DDPSHIM_RECORD=no" in said


def _toy(folder: Optional[Path], num_epochs: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    with ddpshim.record(folder) if folder is not None else open(os.devnull) as run:
        for epoch in range(num_epochs):
            total = 0.0
            for x in DataLoader(torch.randn(40, 4), batch_size=4, shuffle=True):
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                total += loss.item()
                if folder is not None:
                    run.step(loss.item())
            losses.append(total / 10)
            if folder is not None:
                run.epoch(epoch, loss=losses[-1], valid=2 * losses[-1], num_samples=40, lr=0.1)
                checkpoint.save({"net": net.state_dict()}, folder / f"{epoch}.pth")
    return losses, net.state_dict()


def test_one_process_and_a_trainer_of_its_own(tmp_path: Path) -> None:
    plain, weights = _toy(None)
    losses, recorded = _toy(tmp_path)
    assert losses == plain
    assert all(torch.equal(weights[key], recorded[key]) for key in weights)
    run = load(tmp_path)
    assert [epoch.mean for epoch in run.epochs] == losses
    assert [epoch.valid for epoch in run.epochs] == [2 * loss for loss in losses]
    assert [(epoch.steps, epoch.samples) for epoch in run.epochs] == [(10, 40), (10, 40)]
    for epoch in run.epochs:
        row = epoch.training[0]
        assert row.record["own"] == {"Loss": epoch.mean, "lr": 0.1}
        assert sum(row.record["curve"]) / 10 == pytest.approx(epoch.mean, rel=1e-5)
        assert row.record["seconds"]["compute"] > 0
        assert row.record["memory"]["rss"] > 50e6
    assert [row[2] for row in _cells(run, "checkpoints")] == ["0.pth", "1.pth"]
    assert _cells(run, "checkpoints")[0][3] == f"{(tmp_path / '0.pth').stat().st_size / 1e3:.1f} kB"
    assert verdict(run).level == "good"
    assert "Plotly.newPlot" in _page(tmp_path)


def test_the_option_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "world", lambda: ddpshim.World(options=ddpshim.Options(record=False)))
    assert len(_toy(tmp_path)[0]) == 2
    assert not (tmp_path / "ddpshim").exists()


def test_a_failure_is_written_down(tmp_path: Path) -> None:
    with pytest.raises(KeyError), ddpshim.record(tmp_path):
        raise KeyError("on purpose")
    assert verdict(load(tmp_path)).text == "Failed: rank 0: KeyError: 'on purpose'"
    with pytest.raises(SystemExit), ddpshim.record(tmp_path):
        sys.exit(0)
    assert verdict(load(tmp_path)).level == "good"


def test_a_curve_is_bounded_and_loses_no_step() -> None:
    curve = recording._Curve()
    for step in range(1024):
        curve.add(float(step))
    assert len(curve.means) == 16
    assert curve.num_steps == 1024
    assert curve.means == [31.5 + 64 * i for i in range(16)]


# Ranks


def _recorded(folder: str, is_broken: bool = False) -> list[float]:
    here = ddpshim.world()
    net = ddpshim.wrap_parallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    with ddpshim.record(folder) as run:
        for epoch in range(2):
            total = torch.zeros(())
            for x in ddpshim.make_loader(torch.arange(160.0).view(40, 4) / 160, batch_size=4):
                if is_broken and here.rank == 1:
                    with torch.no_grad():
                        net.module.weight.add_(1)
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                total += loss.detach()
            losses.append(float(total / 10))
            ddpshim.check_equal_steps()
            run.epoch(epoch, loss=losses[-1], num_samples=20)
    return losses


@pytest.mark.ranks
def test_each_rank_writes_its_own_file(tmp_path: Path) -> None:
    found = run_ranks(_recorded, 2, str(tmp_path))
    assert found[0] != found[1]
    run = load(tmp_path)
    for rank in (0, 1):
        assert [epoch.training[rank].loss for epoch in run.epochs] == found[rank]
    assert [e.mean for e in run.epochs] == [pytest.approx((a + b) / 2) for a, b in zip(*found)]
    assert [row.record["steps"] for row in run.rows(1)] == [10, 10]
    assert run.rows(0)[0].record["seconds"]["communication"] > 0
    guards = _cells(run, "guards")
    assert [row[1:4] for row in guards] == [["1, 2, 10, 11", "8", "0"], ["10, 20", "4", "0"]]
    assert "No guard failed (8 comparisons of weights, 4 of step counts, on all ranks)" in _said(run)
    assert verdict(run).level == "good"


@pytest.mark.ranks
def test_a_guards_word_is_in_the_records(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="SyncError"):
        run_ranks(_recorded, 2, str(tmp_path), True)
    run = load(tmp_path)
    assert "A guard failed on rank" in findings(run)[0].text
    assert "ranks hold different weights: parameter 'weight'" in findings(run)[0].text
    assert SyncError.__name__ in verdict(run).text


def test_evaluations_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = {"Lift": {"Return": 1.5, "Success_Rate": 0.25, "Time_Episode": 3.0, "video": "a.mp4"}}
    monkeypatch.setattr(robomimic.rollout, "rollout_with_stats", lambda **options: (logs, {}))
    with ddpshim.record(tmp_path):
        assert robomimic.rollout_with_stats(epoch=3, num_episodes=8, envs={}) == (logs, {})
    assert _cells(load(tmp_path), "success")[0][:5] == ["3", "Lift", "8", "25% (3% to 65%)", "1.5"]


# The real trainer

VALIDATION = {
    "experiment__validate": True,
    "experiment__validation_epoch_every_n_steps": 3,
    "train__hdf5_filter_key": "train",
    "train__hdf5_validation_filter_key": "valid",
    "experiment__save__every_n_epochs": 1,
}


def _train(releases: Path, folder: Path, way: str, **how: Any) -> Any:
    if source("0.3.0") is None:
        pytest.skip("robomimic 0.3.0 is not installed (pip install --no-deps robomimic==0.3.0)")
    folder.mkdir(exist_ok=True)
    tree = copy_release("0.3.0", releases, way)
    config = make_config(tree, "bc", make_data(folder, num_demos=50), folder, 10, 2, **VALIDATION)
    return train(tree, config, folder / "run", 2, forked=True, **how)


@pytest.mark.launch
@pytest.mark.robomimic
@pytest.mark.parametrize("way", ["patched", "unedited"])
def test_the_report_of_robomimic_has_the_numbers_of_its_log(releases: Path, tmp_path: Path, way: str) -> None:
    trained = _train(releases, tmp_path, way)
    run = load(trained.folder / "out")
    assert (run.folder / "config.json").exists()
    assert [epoch.mean for epoch in run.epochs] == trained.losses()
    assert [epoch.valid for epoch in run.epochs] == trained.losses("Validation")
    for epoch in run.epochs:
        own = [epoch.training[rank].loss for rank in (0, 1)]
        assert own[0] != own[1]
        assert sum(own) / 2 == pytest.approx(epoch.mean, rel=1e-12)
        assert (epoch.steps, epoch.samples) == (10, 1000)
        assert len(epoch.training[1].record["curve"]) == 10
        assert sum(epoch.training[1].record["curve"]) / 10 == pytest.approx(own[1], rel=1e-5)
    assert verdict(run).level == "good"
    assert [row[2] for row in _cells(run, "checkpoints")] == [f"models/model_epoch_{n}.pth" for n in (1, 2)]
    assert [row[:4] for row in _cells(run, "guards")] == [
        ["weights and random streams of ActorNetwork", "1, 2, 10, 11", "8", "0"],
        ["numbers of backward passes", "10, 20", "4", "0"],
    ]
    assert "Plotly.newPlot" in _page(run.folder)
    if way == "patched":
        without = _train(releases, tmp_path / "off", way, environ={"DDPSHIM_RECORD": "no"})
        assert not list(without.folder.glob("out/**/rank_*.jsonl"))
        for one, other in zip(trained.observed, without.observed):
            assert largest_difference(one["networks"], other["networks"]) == 0
        assert trained.losses() == without.losses()


@pytest.mark.launch
@pytest.mark.robomimic
def test_a_killed_rank_is_told(releases: Path, tmp_path: Path) -> None:
    environ = {"DDPSHIM_FAULT": "kill@model:1:15"}
    trained = _train(releases, tmp_path, "patched", module="tests.faults", environ=environ, check=False, has_agent=True)
    assert trained.exit_code != 0
    run = load(trained.folder / "out")
    assert verdict(run).text == "Failed: rank 1 ended without an error message, perhaps killed (out of memory?)"
    assert [epoch.mean for epoch in run.epochs] == trained.losses()[:1]


@pytest.mark.launch
@pytest.mark.robomimic
def test_without_a_launcher_nothing_is_written(releases: Path, tmp_path: Path) -> None:
    if source("0.3.0") is None:
        pytest.skip("robomimic 0.3.0 is not installed (pip install --no-deps robomimic==0.3.0)")
    tree = copy_release("0.3.0", releases)
    config = make_config(tree, "bc", make_data(tmp_path, num_demos=50), tmp_path, 2, 1)
    trained = train(tree, config, tmp_path / "run", None, module="robomimic.scripts.train", forked=True)
    assert trained.losses()
    assert not list(trained.folder.glob("out/**/*.jsonl"))


# The page of the docs


def test_the_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "check.md").read_text()
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/check.md", "exec"), {})
    run = load(tmp_path / "out" / "run")
    assert [round(epoch.valid or 0, 3) for epoch in run.epochs] == [0.5, 0.25, 0.167]


def test_the_example_trainer_is_recorded(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "examples" / "recorded_run.py"))["main"](str(tmp_path))
    losses = [epoch.mean or 0 for epoch in load(tmp_path).epochs]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 4
