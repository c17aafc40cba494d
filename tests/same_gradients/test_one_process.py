"""Programs for one process (tests/one_process), which know nothing of ranks, on three ranks against one process.

Every second of the idioms and every third of the hostile programs runs here; tests/one_process/runner.py says how to
run all. Batches are of 16 and 7 of 50 samples, which three ranks do not divide. `DDPSHIM_ROWS=all` divides even tiny
networks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpshim import variables
from evidence import bugs
from tests.one_process.__main__ import PROGRAMS
from tests.one_process.compare import compare
from tests.preloaded import environment, start_afresh

DEADLINE_S = 240
# What is not equal, and what is seen instead; docs/run.md lists these exceptions.
REFUSED = {
    "hostile.shape_changed_in_place": "SyncError",
    "hostile.storage_replaced": "SyncError",
    "hostile.hooks_on_several_gradients": "SyncError",
    "hostile.graph_inspected": "AssertionError",  # type(x) is Tensor
    "hostile.loss_in_a_thread": "IndexError",  # of the program, after an error in its thread
    "hostile.contexts_of_torch": "SyncError",  # the program turns __torch_function__ off
}
# `python -m evidence.one_gpu` runs all of them.
OF_GPUS = ["gpus.pinned_by_workers", "gpus.compiled_in_one_piece", "gpus.dropout_of_expanded_rows"]
ALWAYS = [
    *("hostile.asarray_written", "hostile.views_of_parameters", "hostile.gradients_that_keep_their_graph"),
    *("hostile.compiled_eager", "hostile.compiled_in_place", "hostile.third_derivatives", *OF_GPUS),
    *("idioms.losses_that_torch_reads_itself", "idioms.computed_from_parameters", "hostile.gradients_retained"),
    "hostile.functions_that_give_no_gradient",
]
# Of each kind: the network's own, its class, hooks, what is not the network's, and what a call gets and keeps.
CHANGING = [
    *(
        "attribute",
        "list_grows",
        "layer_wrapped",
        "layer_drawn_late",
        "methods_patched",
        "hook_of_all",
        "hook_of_gradients",
    ),
    *("all_frozen_but_the_last", "weights_shared", "a_global", "seeds_inside", "inference", "no_grad_inside"),
    *("a_default", "a_keyword", "a_name", "a_dictionary_of_its_own", "twice", "keeps_a_mean"),
    *("writes_into_its_argument", "relu_in_place_after_batchnorm"),
]
# In which rounding does not grow from step to step.
STEADY = [
    *("idioms.masked_over_item", "idioms.masked_dot_product", "idioms.ignore_index", "idioms.advantage_weighted"),
    *("idioms.gradient_penalty", "idioms.scores_of_a_validation_set", "hostile.third_derivatives"),
]


def _every(number: int, file: str) -> list[str]:
    return [name for name in PROGRAMS if name.startswith(file) and name not in ALWAYS][::number]


ON_RANKS = [*_every(2, "idioms."), *_every(3, "hostile."), *ALWAYS]
CAPTURED = [*(f"changing.{name}" for name in CHANGING), "idioms.ignore_index", "idioms.gradient_penalty"]
EXACT = [*STEADY, *_every(1, "layouts."), *OF_GPUS]


def _results(folder: Path, names: Iterable[str], *options: str, ranks: int = 0, **environ_of: str) -> Any:
    """Return what the programs log and train on `ranks` ranks, or in one process, in a new folder."""
    folder.mkdir()
    launched = ["-m", "ddpshim", "run", "--nproc", str(ranks)] if ranks else []
    command = [*launched, "-m", "tests.one_process", "results", *options, "--only", ",".join(names)]
    environ = {**environment(), variables.ROWS: "all", **environ_of}
    code, output = start_afresh(command, environ, folder, DEADLINE_S)
    assert code == 0, output[-6000:]
    return json.loads((folder / "results" / "results.json").read_text())


def _unequal(plain: Any, ranks: Any, tmp_path: Path) -> dict[str, str]:
    """Return the verdict on each program that differs by more than ten times what a nudge of the last bit changes."""
    verdicts = compare(plain, ranks)
    rounded = [name for name, verdict in verdicts.items() if verdict != "equal" and name not in REFUSED]
    if rounded:
        nudged = _results(tmp_path / "nudged", rounded, "--nudge")
        verdicts |= compare({name: plain[name] for name in rounded}, ranks, nudged)
    return {name: verdict for name, verdict in verdicts.items() if verdict != "equal"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _results(tmp_path_factory.mktemp("one") / "plain", dict.fromkeys([*ON_RANKS, *CAPTURED, *EXACT]))


@pytest.mark.launch
def test_three_ranks_compute_what_one_process_computes(plain: Any, tmp_path: Path) -> None:
    plain = {name: plain[name] for name in ON_RANKS}
    ranks = _results(tmp_path / "ranks", ON_RANKS, ranks=3)
    others = _unequal(plain, ranks, tmp_path)
    if not hasattr(torch.compiler, "is_compiling"):  # torch 2.1, in which some fail in one process too
        others = {name: verdict for name, verdict in others.items() if not verdict.startswith("both: ")}
    for name in [name for name in REFUSED if name in others]:
        assert others.pop(name).startswith(REFUSED[name])
    assert not others


@pytest.mark.launch
def test_captured_calls_see_what_changes(plain: Any, tmp_path: Path) -> None:
    """Calls are captured from the second one on."""
    ranks = _results(tmp_path / "ranks", CAPTURED, ranks=3, DDPSHIM_CAPTURE="force")
    assert _unequal({name: plain[name] for name in CAPTURED}, ranks, tmp_path) == {}


@pytest.mark.launch
def test_exact_has_the_same_bits_on_any_number_of_ranks(plain: Any, tmp_path: Path) -> None:
    one, *others = (_results(tmp_path / str(ranks), EXACT, ranks=ranks, DDPSHIM_EXACT="4") for ranks in (1, 2, 4))
    assert all(found["error"] is None for found in one.values())
    assert [repr(found) for found in others] == [repr(one)] * 2
    assert _unequal({name: plain[name] for name in EXACT}, one, tmp_path) == {}


@pytest.mark.launch
def test_check_says_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = ["-m", "tests.one_process.idioms", "out", "--only", "info_nce,masked_over_item"]
    command = ["check", "--nproc", "3", "--steps", "50", *program]
    monkeypatch.setenv(variables.ROWS, "all")
    code, said = bugs.command(command, tmp_path)
    assert code == 0, said
    assert "the same experiment: yes\n  8 steps on 3 ranks" in said, said
    assert "noise" not in said
