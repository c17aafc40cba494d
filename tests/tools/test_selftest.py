"""`python -m ddpshim selftest`: it passes where all is well, and names the culprit where a fault is put in."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import threading
import time
import types
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
import torch

from ddpshim.__main__ import main
from ddpshim.errors import LaunchError, WorldError
from ddpshim.failures import failure
from ddpshim.tools.selftest import checks
from ddpshim.tools.selftest import running as selftest
from ddpshim.tools.selftest.checks import Outcome, Place, run_rank
from ddpshim.tools.selftest.running import Plan, SelfTestFailed, coloured, run
from tests.preloaded_commands import patience
from tests.ranks import free_port


def _failure(fault: Callable[[Place, Any], None], **options: Any) -> str:
    with pytest.raises(SelfTestFailed) as caught:
        run(Plan(**{"nproc": 2, "device": "cpu", "timeout_s": 60.0, **options}), {}, lambda line: None, fault)
    return str(caught.value)


@pytest.mark.launch
def test_the_command_passes_and_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpu", "--nproc", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ddpshim selftest: 2 ranks on 1 node, cpu"
    expected = ["rendezvous", "collectives", "all-reduce", "sharding", "training", "noise", "checkpoint"]
    assert [line.split()[:2] for line in lines[1:-1]] == [[name, "ok"] for name in expected]
    assert "latency" in lines[3]
    assert "GB/s" in lines[3]
    difference = float(lines[5].split("at most ")[1].split()[0])
    assert difference < 1e-12
    assert lines[-1].startswith("selftest passed: 2 ranks on 1 node, cpu, 7 checks, ")


def test_the_gpu_checks_are_in_their_places() -> None:
    assert [name for name in checks.names("cuda") if name not in checks.names("cpu")] == ["peer-to-peer"]
    assert checks.names("cuda").index("peer-to-peer") == 3


def _with_the_shares_of_rank_0(place: Place, out: Any) -> None:
    from ddpshim.data.torchs_order import TorchsBatches

    if place.rank == 1:
        TorchsBatches._rows = lambda self, batch: range(0, len(batch), self._world.world_size)  # type: ignore[method-assign]
    run_rank(place, out)


@pytest.mark.launch
def test_a_sampler_that_gives_every_rank_the_same_share() -> None:
    said = _failure(_with_the_shares_of_rank_0)
    assert said.startswith("sharding, rank 1: epoch 0, step 0: found samples [[")
    assert "expected [[" in said
    assert "seen twice" in said


def _with_a_step_of_its_own(place: Place, out: Any) -> None:
    if place.rank == 1:
        step = torch.optim.SGD.step

        def larger(self: Any, closure: Any = None) -> None:
            for group in self.param_groups:
                group["lr"] = 0.2
            step(self, closure)

        alone = checks.Rank._train

        def train(self: Any, net: Any, world: Any, device: Any) -> None:
            torch.optim.SGD.step = larger if world.world_size > 1 else step  # type: ignore[method-assign]
            alone(self, net, world, device)

        checks.Rank._train = train  # type: ignore[method-assign]
    os.environ["DDPSHIM_GUARD"] = "0"  # which would name it first
    run_rank(place, out)


@pytest.mark.launch
def test_a_rank_that_trains_another_model() -> None:
    said = _failure(_with_a_step_of_its_own)
    assert said.startswith("training, rank 1: after 5 steps layers.")
    assert "expected below 1e-12" in said


def _with_equal_noise(place: Place, out: Any) -> None:
    checks.shares = types.SimpleNamespace(begin_batch=lambda num_rows: None, end_batch=lambda: None)  # type: ignore[assignment]
    run_rank(place, out)


@pytest.mark.launch
def test_equal_noise() -> None:
    before = {*multiprocessing.active_children()}  # of other tests
    assert re.match(
        r"noise, rank [01]: draws 0\.\d+, \.\.\. for its samples, and one process 0\.", _failure(_with_equal_noise)
    )
    assert {*multiprocessing.active_children()} <= before


def _with_a_damaged_file(place: Place, out: Any) -> None:
    save = checks.checkpoint.save

    def damaging(obj: Any, path: Any) -> None:
        save({"model": {name: tensor + (name == "layers.0.bias") for name, tensor in obj["model"].items()}}, path)

    checks.checkpoint.save = damaging  # type: ignore[assignment]
    run_rank(place, out)


@pytest.mark.launch
def test_a_checkpoint_that_comes_back_changed() -> None:
    assert _failure(_with_a_damaged_file).startswith(
        "checkpoint, rank 0: layers.0.bias was changed by saving and loading;"
    )


def _with_one_rank_killed(place: Place, out: Any) -> None:
    if place.rank == 1:
        checks.CHECKS["all-reduce"] = lambda rank: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value,func-returns-value]
    run_rank(place, out)


@pytest.mark.launch
def test_a_rank_that_is_killed_is_named_and_not_the_one_that_lost_it() -> None:
    said = _failure(_with_one_rank_killed)
    assert said.startswith("all-reduce, rank 1: ended without an error message (killed by SIGKILL)")


@pytest.mark.parametrize("silent", [False, True])
def test_blame_goes_past_a_rank_that_only_lost_or_awaited_another(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "_GRACE_S", 0.1)
    ranks = selftest._Ranks(None, [], run_rank)
    ranks.places = [Place(rank, 2, rank, 2, 0, "127.0.0.1", 1, "cpu", 1.0, "") for rank in range(2)]
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    ranks._pipes = [receive for receive, _ in pipes]
    pipes[0][1].send(Outcome(0, 1.0, 0.0, error="closed by peer", is_consequence=True))
    if not silent:
        pipes[1][1].send(Outcome(1, 2.0, 0.0, error="its own fault"))
    said = r"noise, rank 1: no answer for 1 s \(closed by peer\)" if silent else "^noise, rank 1: its own fault$"
    with pytest.raises(SelfTestFailed, match=said):
        ranks.reports_of("noise", 1.0)


def _with_one_rank_stuck(place: Place, out: Any) -> None:
    if place.rank == 1:
        checks.CHECKS["collectives"] = _sleeps_for_ever
    run_rank(place, out)


def _sleeps_for_ever(rank: Any) -> str:
    threading.Event().wait()
    return ""


@pytest.mark.launch
def test_a_rank_that_is_stuck_is_named_with_its_stack_before_the_deadline() -> None:
    passed: list[float] = []  # when each line was said: the start is no part of what a check may take
    options = Plan(nproc=2, device="cpu", timeout_s=4.0)
    with pytest.raises(SelfTestFailed) as caught:
        run(options, {}, lambda line: passed.append(time.monotonic()), _with_one_rank_stuck)
    assert time.monotonic() - passed[-1] < patience(30)
    said = str(caught.value)
    assert said.startswith("collectives, rank 1: no answer; a job would hang at this stack:")
    assert "_sleeps_for_ever" in said


class _Node(threading.Thread):
    """One node's self-test, beside the others in this process."""

    def __init__(self, port: int, node_rank: int, nnodes: int = 2, fault: Any = None, **options: Any) -> None:
        super().__init__(daemon=True)
        place: dict[str, Any] = {"nnodes": nnodes, "node_rank": node_rank, "master_addr": "127.0.0.1"}
        self.options = Plan(**{"nproc": 1, "device": "cpu", "master_port": port, "timeout_s": 60.0, **place, **options})
        self.lines: list[str] = []
        self.fault = fault
        self.error: Optional[Exception] = None
        self.start()

    def run(self) -> None:
        try:
            self.lines.append(run(self.options, {}, self.lines.append, self.fault))
        except (SelfTestFailed, LaunchError) as error:
            self.error = error

    def finished(self) -> _Node:
        self.join(120)
        assert not self.is_alive()
        return self


@pytest.mark.launch
def test_two_nodes_meet_whichever_comes_first() -> None:
    port = free_port()
    second = _Node(port, 1)
    first = _Node(port, 0, nproc=2)
    for node in (first.finished(), second.finished()):
        assert node.error is None
        assert node.lines[0] == "ddpshim selftest: 3 ranks on 2 nodes, cpu"
        host = socket.gethostname()
        assert node.lines[1].endswith(f"found: {host} (2 ranks), {host} (1 ranks)")
        assert node.lines[-1].startswith("selftest passed: 3 ranks on 2 nodes, cpu, 7 checks")


def _with_a_fault_of_this_node(place: Place, out: Any) -> None:
    def fail(rank: Any) -> str:
        raise WorldError("a made-up fault")

    checks.CHECKS["noise"] = fail
    run_rank(place, out)


@pytest.mark.launch
def test_every_node_names_the_rank_that_failed_on_another() -> None:
    port = free_port()
    nodes = [_Node(port, 0), _Node(port, 1, fault=_with_a_fault_of_this_node)]
    for node in nodes:
        assert str(node.finished().error) == f"node 1 ({socket.gethostname()}): noise, rank 1: a made-up fault"


@pytest.mark.unit
@pytest.mark.parametrize(("text", "is_consequence"), [("Connection reset by peer", True), ("No space left", False)])
def test_a_rank_that_lost_its_peer_when_all_leave_is_not_the_cause(
    text: str, is_consequence: bool, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(f"RuntimeError: {text}\n")
    ranks = object.__new__(selftest._Ranks)
    ranks.places = [types.SimpleNamespace(rank=0, log=str(tmp_path / "log"))]
    ranks._processes = [types.SimpleNamespace(join=lambda seconds: None, exitcode=1)]
    with pytest.raises(SelfTestFailed, match=f"teardown, rank 0: ended without an error message.*\n.*{text}") as error:
        ranks.join(1.0)
    assert error.value.is_consequence is is_consequence


def test_nodes_that_do_not_come_are_named_on_those_that_did() -> None:
    port = free_port()
    for node in [_Node(port, rank, nnodes=4, timeout_s=2.0) for rank in (0, 2)]:
        said = str(node.finished().error)
        assert said.startswith(f"of 4 nodes 1, 3 did not reach 127.0.0.1:{port} within 2 s; found: 0 (")
        assert f"2 ({socket.gethostname()})" in said


def test_two_nodes_with_one_number() -> None:
    port = free_port()
    nodes = [_Node(port, rank, nnodes=3, timeout_s=2.0) for rank in (0, 1, 1)]
    said = [str(node.finished().error) for node in nodes]
    assert sum("--node-rank 1 is used by another node" in text for text in said) == 1
    assert sum("of 3 nodes 2 did not reach" in text for text in said) == 2


def test_a_node_that_is_sent_away_does_not_sign_off_for_the_one_with_its_number() -> None:
    place = Plan(1, "cpu", 3, 1, "127.0.0.1", free_port(), timeout_s=2.0)
    nodes = [selftest._Nodes(replace(place, node_rank=rank)) for rank in (0, 1, 1)]
    nodes[0].store.add("selftest/claims/1", 1)  # as the other one has
    with pytest.raises(LaunchError, match="--node-rank 1 is used by another node"):
        nodes[2].call(place)
    nodes[2].leave()
    nodes[2].store.add("an answer", 1)  # after what this node has set, for which the store gives none
    assert not failure.is_there(nodes[0].store, "selftest/left/1")
    nodes[1].leave()
    nodes[0].store.wait(["selftest/left/1"], timedelta(seconds=50))


def test_a_port_that_nobody_serves_names_host_port_and_what_to_try() -> None:
    port = free_port()
    options = Plan(1, "cpu", 2, 1, "127.0.0.1", port, timeout_s=0.5)
    with pytest.raises(
        LaunchError, match=rf"node 1 cannot reach node 0 at 127\.0\.0\.1:{port} .*node 0 has not started"
    ):
        run(options, {})


def test_a_name_that_is_not_known_is_not_tried_again() -> None:
    options = Plan(1, "cpu", 2, 1, "nowhere.invalid", 29500, timeout_s=600)
    with pytest.raises(LaunchError, match=r"cannot reach node 0 at nowhere\.invalid:29500 .*Use an IP"):
        run(options, {})


def test_silence_of_an_address_points_to_the_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(address: Any, timeout: float) -> Any:
        raise TimeoutError("timed out")

    monkeypatch.setattr(selftest.socket, "create_connection", drop)
    with pytest.raises(
        LaunchError, match=r"That address does not answer.*firewall.*GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    ):
        selftest._reach("10.0.0.1", 29500, 1, 0.1)


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["selftest", "--device", "cpu", "--master-port", str(port)]) == 1
    assert f"selftest failed: MASTER_PORT={port}".lower() in capsys.readouterr().out.lower()


@pytest.mark.launch
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cuda"]) == 1
    assert "selftest failed: rendezvous, rank 0: device='cuda' but torch sees no GPU" in capsys.readouterr().out


def test_the_place_of_a_node_comes_from_its_launcher() -> None:
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_JOB_NODELIST": "gpu[1-2]",
    }
    found = selftest.completed(Plan(nnodes=2), step)
    assert (found.node_rank, found.master_addr) == (1, "gpu1")
    assert found.master_port is not None
    given = selftest.completed(Plan(nnodes=2, node_rank=0, master_addr="a"), step)
    assert (given.node_rank, given.master_addr, given.master_port) == (0, "a", 29500)
    with pytest.raises(LaunchError, match="not started by a launcher with one process on each node"):
        selftest.completed(Plan(nnodes=3), step)
    with pytest.raises(LaunchError, match="--node-rank 2 is not one of 2 nodes"):
        selftest.completed(Plan(nnodes=2, node_rank=2, master_addr="a"), {})
    with pytest.raises(LaunchError, match="nproc=0"):
        selftest.completed(Plan(nproc=0), {})


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured("passed", True) == "passed"
    assert coloured("passed", True, Terminal()) == "\033[32mpassed\033[0m"
    assert coloured("failed", False, Terminal()) == "\033[31mfailed\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("failed", False, Terminal()) == "failed"


@pytest.mark.parametrize("damaged", [None, (1, 2)])
def test_copies_between_gpus_are_compared_by_value(damaged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pretended GPUs: a tensor remembers which one it is on, and one way may damage it."""

    class OnGpu:
        def __init__(self, data: torch.Tensor, gpu: int) -> None:
            self.data, self.gpu = data, gpu

        def to(self, device: str) -> OnGpu:
            gpu = int(device.split(":")[1])
            return OnGpu(self.data + (5 if (self.gpu, gpu) == damaged else 0), gpu)

        def cpu(self) -> torch.Tensor:
            return self.data

    make = torch.arange
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: OnGpu(self, int(device.split(":")[1])))
    monkeypatch.setattr(torch, "arange", lambda *args, **options: make(10))
    rank = checks.Rank(Place(0, 1, 0, 1, 0, "127.0.0.1", 1, "cuda", 1.0, ""))
    rank.world = checks._ALONE
    if damaged is None:
        assert rank.peer_to_peer() == "4 of 6 pairs direct, every copy whole"
    else:
        with pytest.raises(Exception, match=r"a copy from cuda:1 to cuda:2 changed 10 numbers of 10.*NCCL_P2P_DISABLE"):
            rank.peer_to_peer()
