"""ddpshim on simulated GPUs (tests/simulated_gpus): what each rank calls there, in which order, and who waits."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any, Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._device import DeviceContext

import ddpshim
from ddpshim.checkpoint import files as checkpoint
from ddpshim.model import backward
from ddpshim.process.job import current
from ddpshim.rows import calls
from ddpshim.rows.tensor import Counts
from ddpshim.trainers.unedited import joining
from ddpshim.trainers.unedited.reads import equal_reads
from evidence.equivalence import copy_release, make_run_config, source
from tests import simulated_gpus
from tests.preloaded import START_DEADLINE_S, environment, preloaded
from tests.ranks import run_ranks
from tests.same_gradients import test_parallel
from tests.simulated_gpus import Event, recorded

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", autouse=True)
def _gpus() -> None:
    """Built here, not where tests are collected: that takes a while, once for each torch and state of the sources."""
    reason = simulated_gpus.why_not()
    if reason is not None:
        pytest.skip(f"no simulated GPUs: {reason}")


# What they show at all


def _tell_what_happens() -> dict[str, Any]:
    library, cuda, told = simulated_gpus.library(), torch.device("cuda"), {}
    library.use_host_generator(False)
    x = torch.ones(8, device=cuda)
    with recorded() as log:
        x.sum().item()
        torch.zeros(8).to(cuda)
        x[x > 0]
        x.cpu()
        torch.cuda.synchronize()
    told["syncs"] = [(event.what, event.stack[0].rpartition(" ")[2]) for event in log.syncs]

    side = torch.cuda.Stream()
    for waits in (False, True):
        with recorded() as log:
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x * 2
            if waits:
                torch.cuda.current_stream().wait_stream(side)
            z = y + 1
            y.record_stream(torch.cuda.current_stream())
        told[f"races, {waits}"] = [event.what for event in log.races]
        x.add_(z)

    arrives = torch.zeros(8).pin_memory()
    arrives.copy_(z, non_blocking=True)
    before, event = arrives.sum().item(), torch.cuda.Event()
    event.record()
    event.synchronize()
    told["pinned"] = before, arrives.sum().item() == z.sum().item()
    with recorded() as log:
        sent = torch.ones(8).pin_memory()
        x.copy_(sent, non_blocking=True)
        sent.zero_()
        torch.cuda.synchronize()
    told["overwritten"] = [event.what for event in log.races]

    torch.manual_seed(5)
    on_host, here = torch.rand(3), torch.rand(3, device=cuda)
    torch.manual_seed(5)
    told["streams of their own"] = torch.equal(torch.rand(3, device=cuda), here) and torch.equal(torch.rand(3), on_host)
    state = torch.cuda.get_rng_state()
    dropped = nn.functional.dropout(torch.ones(99, device=cuda))
    torch.cuda.set_rng_state(state)
    told["dropout is drawn there"] = torch.equal(nn.functional.dropout(torch.ones(99, device=cuda)), dropped)

    torch.cuda.set_per_process_memory_fraction(0.001)
    for name, act in {
        "mixed": lambda: x + torch.ones(8),
        "other GPU": lambda: x + torch.ones(8, device="cuda:1"),
        "generator": lambda: torch.rand(3, device=cuda, generator=torch.Generator()),
        "memory": lambda: torch.empty(1 << 24, device=cuda),
        "debug": lambda: [torch.cuda.set_sync_debug_mode("error"), x.sum().item()],
    }.items():
        with pytest.raises(RuntimeError) as raised:
            act()
        told[name] = str(raised.value)
    torch.cuda.set_sync_debug_mode("default")
    told["fork"] = _fails_in_a_fork()
    return told


def _fails_in_a_fork() -> str:
    hears, tells = os.pipe()
    if not os.fork():
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as error:
            os.write(tells, str(error).encode())
        os._exit(0)
    os.close(tells)
    with os.fdopen(hears) as said:
        return said.read()


def test_they_tell_what_waits_and_what_races() -> None:
    (told,) = run_ranks(_tell_what_happens, 1, on_gpus=True)
    here = "_tell_what_happens"
    what = ["item", "copy to the GPU", "aten::nonzero", "copy to the host"]
    assert told["syncs"] == [*((text, here) for text in what), ("device", "synchronize")]
    assert told["races, False"]
    assert all("without having waited for it" in race for race in told["races, False"])
    assert told["races, True"] == []
    assert told["pinned"] == (0.0, True)
    assert len(told["overwritten"]) == 1
    assert "pinned memory was written to" in told["overwritten"][0]
    assert told["streams of their own"]
    assert told["dropout is drawn there"]
    assert "cuda:0 and cpu" in told["mixed"]
    assert "cuda:0 and cuda:1" in told["other GPU"]
    assert "Expected a 'cuda' device type for generator" in told["generator"]
    assert "CUDA out of memory" in told["memory"]
    assert "called a synchronizing CUDA operation" in told["debug"]
    assert "Cannot re-initialize CUDA in forked subprocess" in told["fork"]


# The tests of test_parallel.py


class _MadeOnGPU(DeviceContext):
    """What tests make without saying where is made on the GPU; what ddpshim makes stays where it says."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame and not ("/tests/" in frame.f_code.co_filename or "/ddpshim/" in frame.f_code.co_filename):
            frame = frame.f_back
        if frame and "/tests/" in frame.f_code.co_filename:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _on_gpu(fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn` of tests/same_gradients/test_parallel.py returns where all that it makes is made on this rank's GPU."""
    warnings.filterwarnings("ignore", "CUDA reports that you have")  # fork_rng, of the other GPU's generator
    batches = test_parallel._batches

    def on_gpu(steps: int) -> Any:
        with torch.device("cpu"):
            return [(x.cuda(), y.cuda()) for x, y in batches(steps)]

    test_parallel._batches = on_gpu
    with _MadeOnGPU(torch.device("cuda")):
        return fn(*args)


def _run_on_gpus(fn: Callable[..., Any], num_ranks: int, *args: Any, **options: Any) -> list[Any]:
    return run_ranks(_on_gpu, num_ranks, fn, *args, **options, on_gpus=True)


_PARALLEL: list[tuple[Any, tuple[Any, ...]]] = [
    (test_parallel.test_every_way_to_train_equals_one_process, (test_parallel.WAYS, 2)),
    (test_parallel.test_one_rank_alone_may_run_the_wrapped_network, ()),
    (test_parallel.test_wrapping_twice_and_child_then_parent_reduces_once, ()),
    (test_parallel.test_what_no_rank_used_has_no_gradient_and_any_buffer_is_the_main_ranks, ()),
]


@pytest.mark.parametrize(("test", "args"), _PARALLEL, ids=[test.__name__[len("test_") :] for test, _ in _PARALLEL])
def test_of_parallel(test: Any, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_parallel, "run_ranks", _run_on_gpus)
    test(*args)


def test_two_ranks_on_one_gpu_train_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = []

    def run(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        ranks = _run_on_gpus(_with_backend, num_ranks, fn, *args, environ={"CUDA_VISIBLE_DEVICES": "1"})
        backends.extend(backend for backend, _ in ranks)
        return [returned for _, returned in ranks]

    monkeypatch.setattr(test_parallel, "run_ranks", run)
    test_parallel.test_one_rank_alone_may_run_the_wrapped_network()
    assert backends == ["gloo on cuda:0"] * 2


def _with_backend(fn: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    here = ddpshim.world()
    return f"{here.backend} on {here.device}", fn(*args)


# Who waits in a step, and who launches what when


class _Unused(nn.Module):
    """A part of it is in no backward pass; where ranks may differ, another part is used on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.odd = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_odd = ddpshim.world().is_main and not current().door.computes_alike
        return self.odd(self.used(x)) if is_odd else self.used(x)


_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)),
    "unused": _Unused,
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
    "batchnorm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)),
}
_WARM_UP, _STEPS = 10, 3  # weights are compared at the tenth


def _rank_counts_syncs(on_rows: bool) -> dict[str, tuple[list[str], list[str]]]:
    """For each network the waits of the host, and the races, in some steps."""
    here, counted = ddpshim.world(), {}
    if on_rows:
        current().door = joining.DOOR
        current().at_end.enter_context(calls.installed())
    networks = {kind: make().to(here.device) for kind, make in _NETWORKS.items()}
    for kind, bare in networks.items():
        net = ddpshim.wrap_parallel(bare)
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        x = torch.randn(4, 4, 8, device=here.device) if kind == "transformer" else torch.randn(4, 8, device=here.device)
        for step in range(_WARM_UP + 1):
            with recorded() as log:
                for _ in range(_STEPS if step == _WARM_UP else 1):
                    optimizer.zero_grad()
                    net(x).pow(2).mean().backward()
                    optimizer.step()
        assert bool(current().part(Counts).on_rows) == on_rows
        counted[kind] = [str(event) for event in log.syncs if not _may_wait(event)], [e.what for e in log.races]
    return counted


def _may_wait(event: Event) -> bool:
    """Whether neither ddpshim nor torch's reducer waits here."""
    return bool(event.cause) and "/ddpshim/" not in event.cause


@pytest.mark.parametrize("on_rows", [False, True], ids=["shares", "rows"])
def test_no_host_waits_in_a_usual_step(on_rows: bool) -> None:
    for counted in run_ranks(_rank_counts_syncs, 2, on_rows, on_gpus=True, environ={"DDPSHIM_ROWS": "all"}):
        assert counted == dict.fromkeys(_NETWORKS, ([], []))


def _rank_reads_nan() -> list[str]:
    here, said = ddpshim.world(), list[str]()
    with mock.patch.object(backward, "say", said.append), equal_reads(here):
        current().door = joining.DOOR
        for number in (1.0, float("nan"), float("nan")):
            torch.tensor(number, device=here.device).item()
    return said


def test_nan_that_a_program_reads_from_a_gpu_is_said_once() -> None:
    (said,), other = run_ranks(_rank_reads_nan, 2, on_gpus=True)
    assert re.fullmatch(
        r"the program reads NaN after 0 backward passes \(\S+:\d+\)\. The training goes on, as in one process", said
    )
    assert other == []


def _rank_saves(folder: str) -> list[bool]:
    state, checkpoint._LEAST_BYTES = nn.Linear(64, 64).to("cuda").state_dict(), 0
    checkpoint.save_in_background(state, f"{folder}/ours.pth")
    checkpoint.flush()
    torch.save(state, f"{folder}/torchs.pth")
    ours, torchs = torch.load(f"{folder}/ours.pth"), torch.load(f"{folder}/torchs.pth")
    batch = {"pinned": torch.ones(2).pin_memory(), "others": (torch.ones(1), ["text"])}
    sent = [(b["pinned"], b["others"][0], b["others"][1]) for b in ddpshim.on_device([batch])]
    assert [(x.device.type, y.device.type, text) for x, y, text in sent] == [("cuda", "cuda", ["text"])]
    return [torch.equal(ours[key], torchs[key]) and ours[key].is_cuda for key in state]


def test_what_is_saved_of_a_gpu_is_loaded_there(tmp_path: Path) -> None:
    assert run_ranks(_rank_saves, 1, str(tmp_path), on_gpus=True) == [[True, True]]


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.often, self.seldom = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, is_whole: bool = True) -> torch.Tensor:
        x = self.trunk(x)
        return self.often(x) + self.seldom(x) if is_whole else self.often(x)


def _rank_trains_five_networks(at_once: bool) -> tuple[list[tuple[str, str, int]], list[list[torch.Tensor]]]:
    here = ddpshim.world()
    torch.manual_seed(1)
    nets = [_Branches().to(here.device) for _ in range(5)]
    searches = True if at_once else None
    wrapped = [ddpshim.wrap_parallel(net, bucket_cap_mb=0.0002, find_unused_parameters=searches) for net in nets]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    launches: list[tuple[str, str, int]] = []
    for _ in range(4):
        x = torch.randn(4, 8, device=here.device)
        with recorded() as log:
            losses = [net(x, not (here.rank and i == 2)).pow(2).mean() for i, net in enumerate(wrapped)]
            for loss in [sum(losses)] if at_once else losses:  # type: ignore[list-item]
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        launches += [(event.communicator, event.what, event.bytes) for event in log.launches]
    return launches, [[p.detach() for p in net.parameters()] for net in nets]


@pytest.mark.parametrize("at_once", [False, True], ids=["each on its own", "in one backward pass"])
def test_all_ranks_launch_in_one_order_though_one_leaves_a_branch_out(at_once: bool) -> None:
    (first, ours), (second, theirs) = run_ranks(_rank_trains_five_networks, 2, at_once, on_gpus=True)
    assert len(first) > 5
    assert first == second
    assert len({communicator for communicator, _, _ in first}) == 1, "all networks share one"
    for mine, others in zip(ours, theirs):
        assert all(torch.equal(a, b) for a, b in zip(mine, others))


def _rank_trains_two_networks_at_once() -> str:
    here = ddpshim.world()
    nets = [_Branches().to(here.device) for _ in range(2)]
    wrapped = [ddpshim.wrap_parallel(net) for net in nets]
    optimizer = torch.optim.SGD(nets[0].parameters(), 0.1)
    x = torch.randn(4, 8, device=here.device)
    losses = [net(x, not (here.rank and net is wrapped[1])).pow(2).mean() for net in wrapped]
    (losses[0] + losses[1]).backward()
    if here.rank:
        with pytest.raises(ddpshim.SyncError) as raised:
            optimizer.step()
        return str(raised.value)
    return ""


def test_buckets_of_networks_in_another_order_are_an_error() -> None:
    said = run_ranks(_rank_trains_two_networks_at_once, 2, on_gpus=True)[1]
    assert said.startswith("parameter 'seldom.weight' of _Branches was used by other ranks only, in one backward pass")
    assert "find_unused_parameters=True" in said


# Calls that work on the CPU


class _Odd(nn.Module):
    """A module that is called in all the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Any = None, times: Any = 1.0, how: str = "") -> torch.Tensor:
        if how == "in place":
            x += 1
        return (self.weight * (1.0 if x is None else x)).sum() * times


def _rank_is_called_oddly() -> tuple[list[float], list[float]]:
    here = ddpshim.world()
    wrapped = ddpshim.wrap_parallel(_Odd().to(here.device))
    losses = []
    for where in (torch.device("cpu"), here.device):
        x, half = torch.arange(3.0, device=where), torch.tensor(0.5, device=where)
        for args in ((), (3.0,), (x,), (half,), (x, half), (torch.zeros(0, 3, device=where),)):
            losses.append(wrapped(*args))
            losses[-1].backward()
    wrapped(x, how="in place").backward()
    return [loss.item() for loss in losses], x.tolist()


def test_a_wrapped_network_may_be_called_as_the_bare_one() -> None:
    for losses, written in run_ranks(_rank_is_called_oddly, 2, on_gpus=True):
        assert losses == [6, 18, 6, 3, 3, 0] * 2
        assert written == [1, 2, 3]


# Whole programs


def _run_on_simulated(tree: Path, folder: Path, *argv: str, **environ: str) -> str:
    """What `python -m argv…` printed, forked from a process whose torch has GPUs."""
    variables, simulated = environment(tree), simulated_gpus.environment()
    path = os.pathsep.join([variables["PYTHONPATH"], simulated["PYTHONPATH"]])  # for what is not forked
    commands = [(list(argv), {**variables, **simulated, **environ, "PYTHONPATH": path})]
    code = preloaded(tree, on_gpus=True).start(commands, folder).wait(START_DEADLINE_S)
    said = (folder / "output.txt").read_text()
    assert code == 0, said[-3000:]
    return said


def _losses(said: str) -> list[float]:
    parts = said.split("\nTrain Epoch ")[1:]
    return [json.JSONDecoder().raw_decode(part[part.index("{") :])[0]["Loss"] for part in parts]


@pytest.mark.launch
@pytest.mark.robomimic
@pytest.mark.skipif(source("0.3.0") is None, reason="robomimic 0.3.0 is not installed")
@pytest.mark.parametrize("variant", ["td3_bc", "bc_transformer"])
def test_the_released_robomimic_on_two_gpus_has_the_losses_of_cpus(
    variant: str, tmp_path: Path, releases: Path
) -> None:
    tree = copy_release("0.3.0", releases, "unedited")
    losses = {}
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        folder.mkdir()
        config = make_run_config(tree, "0.3.0", variant, folder, 5, 2, train__cuda=device == "cuda")
        command = ["ddpshim", "run", "--nproc=2", "-m", "robomimic.scripts.train", "--config", str(config)]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        said = _run_on_simulated(tree, folder, *command, SIMULATED_GPUS_LOG=str(folder / "log"), **hidden)
        where = "GPU (torchrun, nccl)" if device == "cuda" else "CPU (torchrun, gloo)"
        assert f"ddpshim: 2 ranks on this machine, {where}" in said
        losses[device] = _losses(said)
    assert len(losses["cpu"]) == 2
    # Attention goes by the sums of torch's plain formula, which CPUs have in one kernel.
    assert losses["cuda"] == (pytest.approx(losses["cpu"], rel=1e-6) if "transformer" in variant else losses["cpu"])
    logs = simulated_gpus.read_log(tmp_path / "cuda" / "log")
    launches = [[(event.communicator, event.what, event.bytes) for event in logs[rank].launches] for rank in "01"]
    assert len(launches[0]) > 10
    assert launches[0] == launches[1]
    assert [event.what for rank in "01" for event in logs[rank].races] == []
