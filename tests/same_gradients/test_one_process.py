"""Programs for one process (tests/one_process), which know nothing of ranks, on three ranks against one process.

Every second of the idioms and every fourth of the hostile programs runs here; tests/one_process/runner.py says how to
run all. Batches are of 16 and 7 of 50 samples, which three ranks do not divide. `DDPSHIM_ROWS=all` divides even tiny
networks.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpshim import variables
from evidence import bugs
from tests.one_process.compare import compare
from tests.preloaded import environment, start_afresh

DEADLINE_S = 240
EVERY = {"idioms": 2, "hostile": 4, "gpus": 1}
# What is not equal, and what is seen instead; docs/run.md lists these exceptions.
REFUSED = {
    "shape_changed_in_place": "SyncError",
    "storage_replaced": "SyncError",
    "hooks_on_several_gradients": "SyncError",
    "graph_inspected": "AssertionError",  # type(x) is Tensor
    "loss_in_a_thread": "IndexError",  # of the program, after an error in its thread
    "contexts_of_torch": "SyncError",  # the program turns __torch_function__ off
}
# They look at a tensor's class or address, or count the functions that torch calls: these differ, numbers do not.
SEEN = {"printed", "memory_looked_at", "tensors_of_its_own_kind", "modes_over_dispatch"}
HALF = {"autocast_to_bfloat16"}  # rounded to 8 bits, in another order
SLOW = {"compiled_by_inductor", "compiled_loss", "compiled_step"}
ALWAYS = {
    "asarray_written",
    "views_of_parameters",
    "batches_that_combine_samples",
    "compiled_eager",
    "compiled_in_place",
    "gradients_that_keep_their_graph",
}
# `python -m evidence.one_gpu` runs all of them.
OF_GPUS = ["pinned_by_workers", "compiled_in_one_piece", "dropout_of_expanded_rows"]


def _run(folder: Path, *command: str, **environ_of: str) -> str:
    """Run `python command…`, forked, in a new folder; return its output."""
    folder.mkdir()
    environ = {**environment(), variables.ROWS: "all", **environ_of}
    code, output = start_afresh(command, environ, folder, DEADLINE_S)
    assert code == 0, output[-6000:]
    return output


def _programs(of: str) -> list[str]:
    return OF_GPUS if of == "gpus" else list(importlib.import_module(f"tests.one_process.{of}").PROGRAMS)


def _results(program: str, folder: Path, *options: str, ranks: int = 0, **environ_of: str) -> Any:
    launched = ["-m", "ddpshim", "run", "--nproc", str(ranks)] if ranks else []
    _run(folder, *launched, "-m", f"tests.one_process.{program}", "results", *options, **environ_of)
    return json.loads((folder / "results" / "results.json").read_text())


@pytest.mark.launch
@pytest.mark.parametrize("program", ["idioms", "hostile", "gpus"])
def test_three_ranks_compute_what_one_process_computes(program: str, tmp_path: Path) -> None:
    programs = _programs(program)
    chosen = [name for name in programs if name not in SLOW | ALWAYS][:: EVERY[program]]
    chosen += [name for name in programs if name in ALWAYS]
    only = ["--only", ",".join(chosen)]
    plain = _results(program, tmp_path / "plain", *only)
    ranks = _results(program, tmp_path / "ranks", *only, ranks=3)
    verdicts = compare(plain, ranks)
    for name in SEEN | HALF:
        verdicts.pop(name, None)
    rounded = [name for name, verdict in verdicts.items() if verdict != "equal" and name not in REFUSED]
    if rounded:
        nudged = _results(program, tmp_path / "nudged", "--nudge", "--only", ",".join(rounded))
        verdicts |= compare({name: plain[name] for name in rounded}, ranks, nudged)
    others = {name: verdict for name, verdict in verdicts.items() if verdict != "equal"}
    if not hasattr(torch.compiler, "is_compiling"):  # torch 2.1, in which some fail in one process too
        others = {name: verdict for name, verdict in others.items() if not verdict.startswith("both: ")}
    for name in [name for name in REFUSED if name in others]:
        assert others.pop(name).startswith(REFUSED[name])
    assert not others


@pytest.mark.launch
@pytest.mark.parametrize(("program", "every", "num_ranks"), [("changing", 3, 3), ("idioms", 8, 2)])
def test_captured_calls_see_what_changes(program: str, every: int, num_ranks: int, tmp_path: Path) -> None:
    """Calls are captured from the second one on."""
    names = [name for name in _programs(program)[::every] if name != "autocast"]  # of 8 bits
    plain = _results(program, tmp_path / "plain", "--only", ",".join(names))
    ranks = _results(program, tmp_path / "ranks", "--only", ",".join(names), ranks=num_ranks, DDPSHIM_CAPTURE="force")
    assert {name: verdict for name, verdict in compare(plain, ranks, plain).items() if verdict != "equal"} == {}


@pytest.mark.launch
@pytest.mark.parametrize(("program", "every"), [("idioms", 8), ("layouts", 1), ("gpus", 1)])
def test_exact_has_the_same_bits_on_any_number_of_ranks(program: str, every: int, tmp_path: Path) -> None:
    chosen = ["--only", ",".join(_programs(program)[::every])]
    one, *others = (
        _results(program, tmp_path / str(ranks), *chosen, ranks=ranks, DDPSHIM_EXACT="4") for ranks in (1, 2, 4)
    )
    assert all(found["error"] is None for found in one.values())
    assert [repr(found) for found in others] == [repr(one)] * 2
    plain = _results(program, tmp_path / "plain", *chosen)
    assert set(compare(plain, one).values()) == {"equal"}


@pytest.mark.launch
def test_check_says_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = ["-m", "tests.one_process.idioms", "out", "--only", "info_nce,masked_over_item"]
    command = ["check", "--nproc", "3", "--steps", "50", *program]
    monkeypatch.setenv(variables.ROWS, "all")
    code, said = bugs.command(command, tmp_path)
    assert code == 0, said
    assert "the same experiment: yes\n  8 steps on 3 ranks" in said, said
    assert "noise" not in said
