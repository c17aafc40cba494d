"""The option `graphs`: captured calls are replayed as static graphs, with all bits; `CpuGraph` stands in for CUDA's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ddpshim
from ddpshim import Options
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced
from ddpshim.rows import blocks, calls, capture, graphs
from ddpshim.rows.graphs import CpuGraph, NotStatic, Replayer
from tests.one_process import graphed
from tests.one_process.compare import compare
from tests.one_process.runner import Log, read
from tests.same_gradients.test_one_process import _results

pytestmark = pytest.mark.skipif(not capture.is_supported(), reason="torch before 2.8 does not capture")

# What of these is replayed: the rest is recorded, compared, or has a reason.
REPLAYED = {
    "learning_rate_and_probability": (7, {}),
    "a_buffer_that_forward_reads_and_writes": (20, {}),
    "smaller_last_batches": (8, {}),
    "a_weight_that_moves": (5, {"a weight has moved": 2}),
    "gradients_that_are_kept": (10, {}),
    "a_second_backward_pass": (10, {}),
    "two_calls": (10, {"called again before its backward pass": 3}),
    "results_that_are_written": (10, {}),
    "a_constant_of_the_host": (0, {"aten.lift_fresh.default uses a tensor of the host": 13}),
    "a_shared_layer_and_a_penalty": (10, {}),
    "a_result_of_a_result": (20, {}),
    "hooks_of_weights": (0, {"a weight has a hook": 12}),
    "autocast": (0, {"autocast keeps what it casts for other calls: torch.autocast(..., cache_enabled=False)": 12}),
}
ROUNDED = {"a_penalty_now_and_then"}  # gradients of gradients are summed in another order, once


@contextlib.contextmanager
def _graphed() -> Iterator[graphs.Graphs]:
    """Within this block networks are captured and replayed as graphs, in one process without a launcher."""
    of_job = current().part(calls.Calls)
    if of_job.original is None:
        current().at_end.enter_context(calls.installed())
    counts, state = current().part(graphs.Graphs), current().part(blocks.State)
    counts.replayed, counts.by_function = 0, type(counts.by_function)()
    with contextlib.ExitStack() as undo:
        for one in ((state, "has_graphs", True), (of_job, "least_operations", 0), (of_job, "least_work", 0)):
            undo.enter_context(replaced(*one))
        yield counts


def _logged(name: str) -> Any:
    torch.manual_seed(0)
    log = Log()
    trained = graphed.PROGRAMS[name](log)
    weights = [read(x) for one in trained if isinstance(one, nn.Module) for x in one.state_dict().values()]
    return {"log": log.lines, "weights": weights, "error": None}


def _check(name: str) -> tuple[int, dict[str, int]]:
    """Compare a program with graphs and without; return how many calls were replayed, and why others were not."""
    plain = _logged(name)
    with _graphed() as counts:
        found = _logged(name)
    if name in ROUNDED:
        assert set(compare({name: plain}, {name: found}).values()) == {"equal"}
    else:
        assert json.dumps(found) == json.dumps(plain)
    return counts.replayed, {why: num for why, num in counts.by_function.items() if not why.startswith("recording")}


@pytest.mark.parametrize("name", REPLAYED)
def test_bits_are_those_without_graphs(name: str) -> None:
    assert _check(name) == REPLAYED[name]


@pytest.mark.daily
@pytest.mark.parametrize("name", [name for name in graphed.PROGRAMS if name not in REPLAYED])
def test_bits_of_all_programs_are_those_without_graphs(name: str) -> None:
    _check(name)


@pytest.mark.launch
def test_on_ranks_bits_are_those_of_replays_without_graphs(tmp_path: Path) -> None:
    """Between the messages of BatchNorm; batches of 10 on 3 ranks."""
    names = ["graphed.a_critic_of_real_and_made", "graphed.an_assertion"]
    plain = _results(tmp_path / "traced", names, ranks=3, DDPSHIM_CAPTURE="force")
    found = _results(tmp_path / "graphs", names, ranks=3, DDPSHIM_GRAPHS="on")
    assert json.dumps(found) == json.dumps(plain)


class _Trained:
    """Steps of a function of one weight, through a Replayer."""

    def __init__(self, function: Any) -> None:
        self.weight = nn.Parameter(torch.ones(4))
        self.replayer = Replayer("Net", function)

    def step(self, *others: Any) -> Tensor:
        (out,) = self.replayer(self.weight, torch.randn(4), *others)
        self.weight.grad = None
        out.sum().backward()
        return self.weight.grad  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda weight, x: [weight * x.sum().item()], "the host waits for aten._local_scalar_dense.default"),
        (lambda weight, x: [weight[x > 0]], "the host waits for aten.index.Tensor"),
        (lambda weight, x: [weight[x.nonzero()[:, 0]]], "the host waits for aten.nonzero.default"),
        (lambda weight, x: [weight * torch.tensor(2.0)], "aten.lift_fresh.default uses a tensor of the host"),
        (lambda weight, x: [(weight * x.mul_(2))], "it writes into what it gets"),
        (lambda weight, x: [weight.view(2, 2)], "its results share memory"),
        (lambda weight, x: [(y := weight * x), y[:2]], "its results share memory"),
    ],
)
def test_what_a_graph_cannot_hold_is_computed_by_the_function(function: Any, why: str) -> None:
    trained = _Trained(function)
    for _ in range(4):
        x = torch.randn(4)
        outputs = trained.replayer(trained.weight, x.clone())
        assert all(map(torch.equal, outputs, function(trained.weight, x)))
        outputs[0].sum().backward()
    assert (trained.replayer.refused, trained.replayer.num_replays) == (why, 0)


@pytest.mark.parametrize("late", [0, 12])
def test_a_graph_that_differs_from_its_function_is_given_up_or_ends_the_job(late: int) -> None:
    """What the function takes from Python is not seen; the first comparison, or one after 10 replays, sees it."""
    factor = [1.0]
    trained = _Trained(lambda weight, x: [weight * x * factor[0]])
    for _ in range(late or 2):
        trained.step()
    assert trained.replayer.num_replays == max(0, late - 3)
    factor[0] = 2.0
    if late:
        trained.step()
        with pytest.raises(
            ddpshim.SyncError, match=r"the static graph of Net was compared .* after 10 replays: results"
        ):
            trained.step()
    else:
        x = torch.randn(4)
        (out,) = trained.replayer(trained.weight, x)
        assert torch.equal(out, trained.weight * x * 2)
        assert trained.replayer.refused == "results of its graph are others than those of its operations"


def test_a_graph_replays_at_its_addresses() -> None:
    x, weight = torch.ones(3), torch.arange(3.0)
    with CpuGraph({x.untyped_storage()._cdata, weight.untyped_storage()._cdata}) as graph:
        out = (x * weight).view(3, 1)
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [[0], [5], [10]]
    with pytest.raises(NotStatic, match=r"aten.mul.Tensor uses a tensor of the host"), CpuGraph(set()):
        x * weight


def test_what_is_written_before_the_backward_pass_is_seen_as_in_torch() -> None:
    trained = _Trained(lambda weight, x: [weight.exp() * x.exp() * weight])
    for _ in range(4):
        trained.step()
    (out,) = trained.replayer(trained.weight, torch.randn(4))
    out.data.zero_()
    with torch.no_grad():
        trained.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    (out,) = trained.replayer(trained.weight, torch.randn(4))
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_options_that_contradict_it_are_refused() -> None:
    options = Options.read({"DDPSHIM_GRAPHS": "on"})
    assert options.graphs == "on"
    capture.check_options(options)
    for other in ({"exact": 4}, {"capture": "off"}, {"rows_at_once": 2}):
        with pytest.raises(ddpshim.errors.OptionsError, match=r"graphs=on.*: rows_at_once and graphs compute what"):
            capture.check_options(Options(graphs="on", **other))  # type: ignore[arg-type]


def test_the_last_line_counts_and_gives_reasons() -> None:
    counts = graphs.Graphs()
    counts.replayed, counts.by_function["recording and comparing"] = 8, 2
    with mock.patch.object(graphs, "current", return_value=mock.Mock(part=lambda kind: counts)):
        said = graphs.summary({"Critic": "it gathers a tensor"})
    assert said == (
        "DDPSHIM_GRAPHS=on: 8 of 10 calls were replayed as graphs (others: 2 recording and comparing; Critic is not "
        "traced: it gathers a tensor)"
    )
