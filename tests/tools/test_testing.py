"""Ranks that are forked from this process, and the helpers by which users test their trainers."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import select
import signal
import time
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim
from ddpshim.errors import LaunchError, RankError
from ddpshim.launch import spawning
from ddpshim.testing import _compared, _leaves, assert_same_training
from tests.preloaded_commands import patience

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0

pytestmark = pytest.mark.ranks


def test_spawn_returns_what_the_function_returns(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)

    def drawn(scale: int) -> Any:
        here = ddpshim.setup()
        print(f"rank {here.rank} prints")
        torch.set_num_threads(4)
        return {"rank": here.rank, "sum": here.sum(here.rank + 1), "drawn": scale * torch.rand(2), "pid": os.getpid()}

    found = ddpshim.spawn(drawn, 2, 1, every_rank=True, deadline_s=patience(DEADLINE_S))
    assert [(each["rank"], each["sum"]) for each in found] == [(0, 3), (1, 3)]
    assert all(each["drawn"].equal(expected) for each in found)
    assert len({os.getpid(), *(each["pid"] for each in found)}) == 3
    said = capfd.readouterr()
    assert said.out == "rank 0 prints\n"
    assert said.err.count("torch.set_num_threads(4) is ignored: this rank was forked") == 1
    assert ddpshim.spawn(lambda: ddpshim.setup().world_size, 1, deadline_s=patience(DEADLINE_S)) == 1


def _on_rank_1(act: Callable[[], Any]) -> Callable[[], None]:
    def function() -> None:
        here = ddpshim.setup()
        if here.rank == 1:
            act()
        here.barrier()

    return function


def _fail() -> None:
    print("what rank 1 printed")
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (
            _fail,
            r"(?s)^rank 1 of 2 failed first:\n.*in _fail\n.*ValueError: on purpose\n.*printed:\nwhat rank 1 printed$",
        ),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"^rank 1 of 2 failed first:\n.*an error message \(SIGKILL\)$"),
        (lambda: os._exit(3), r"^rank 1 of 2 failed first:\n.*without an error message \(exit code 3\)$"),
    ],
)
def test_the_rank_that_failed_first_is_named(act: Callable[[], Any], text: str) -> None:
    with pytest.raises(RankError, match=text):
        ddpshim.spawn(_on_rank_1(act), 2, deadline_s=patience(DEADLINE_S))


def test_what_cannot_be_sent_or_compared_is_refused() -> None:
    said = "TypeError: function cannot be sent to the process that waits for it: .*lambda"
    with pytest.raises(RankError, match=said):
        ddpshim.spawn(lambda: lambda: 1, 1, deadline_s=patience(DEADLINE_S))
    with pytest.raises(RankError, match=r"train\(\) did not call ddpshim.setup\(\): 2 ranks were 2 runs"):
        assert_same_training(lambda: torch.ones(1), deadline_s=patience(DEADLINE_S))
    with pytest.raises(AssertionError, match="returned no tensor and no float"):
        assert_same_training(lambda: {"epochs": 3}, deadline_s=patience(DEADLINE_S))


def test_at_the_deadline_ranks_say_where_they_hang() -> None:
    deadline_s = patience(6.0)  # both are at their last line long before
    with pytest.raises(RankError, match=rf"ranks 0, 1 of 2 still ran after {deadline_s:g} s") as error:
        ddpshim.spawn(_on_rank_1(lambda: time.sleep(1000)), 2, deadline_s=deadline_s)
    stacks = str(error.value).split("innermost call first:\n")[1:]
    assert [re.findall(r"line \d+ in (\w+)", stack)[-1] for stack in stacks] == ["function", "function"]
    assert "in barrier" in stacks[0]
    assert "in <lambda>" in stacks[1]


def test_ctrl_c_reaches_every_rank_once(tmp_path: Path) -> None:
    def function() -> None:
        here = ddpshim.setup()
        (tmp_path / "ready").mkdir(exist_ok=True)
        try:
            (tmp_path / "ready" / str(here.rank)).touch()
            while here.rank == 0 and len([*(tmp_path / "ready").iterdir()]) < 2:
                time.sleep(0.05)  # in no collective, which would fail for the other rank as soon as this one ends
            if here.rank == 0:
                os.kill(os.getppid(), signal.SIGINT)
            while True:  # a signal that comes just before a sleep does not end it
                time.sleep(0.05)
        except KeyboardInterrupt:
            (tmp_path / f"rank_{here.rank}").touch()
            raise

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            ddpshim.spawn(function, 2, deadline_s=patience(DEADLINE_S))
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(path.name for path in tmp_path.glob("rank_*")) == ["rank_0", "rank_1"]


def test_ranks_end_with_the_process_that_was_killed() -> None:
    alive, held = os.pipe()  # every rank holds one end of it

    def function() -> None:
        here = ddpshim.setup()
        here.barrier()
        if here.rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    parent = multiprocessing.get_context("fork").Process(target=ddpshim.spawn, args=(function, 2))
    parent.start()
    os.close(held)
    parent.join(patience(DEADLINE_S))
    assert parent.exitcode == -signal.SIGKILL
    assert select.select([alive], [], [], patience(DEADLINE_S))[0], "a rank goes on"
    assert os.read(alive, 1) == b""  # at the end of the last
    os.close(alive)


def test_what_cannot_be_forked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"nproc=0.*Give the number of ranks"):
        ddpshim.spawn(print, 0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(LaunchError, match="in a process that is in a distributed job itself"):
        ddpshim.spawn(print, 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match=r"has used a GPU .* Restart it \(the notebook's kernel\)"):
        ddpshim.spawn(print, 2)
    monkeypatch.setattr(spawning.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(LaunchError, match=r"needs fork, which .* lacks"):
        ddpshim.spawn(print, 2)


def test_the_pages_example() -> None:
    page = (ROOT / "docs" / "check.md").read_text()
    source = re.findall("```python\n(import torch\n.*?)```", page, re.DOTALL)[0]
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "docs/check.md", "exec"), names)
    names["test_two_ranks_train_as_one_process_does"]()


def _train(spoil: str = "") -> Any:
    here = ddpshim.setup(seed=1)
    policy = ddpshim.wrap_parallel(nn.Linear(8, 2))
    data = TensorDataset(torch.randn(16, 8))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for (obs,) in ddpshim.make_loader(data, batch_size=8, shuffle=spoil == "its own order"):
        loss = policy(obs).square().mean()
        if spoil == "a sum for a mean":
            loss = loss * len(obs)
        if spoil == "no seed":
            loss = loss * here.run_on_main(lambda: 1.0 + os.urandom(1)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"weights": policy.state_dict(), "rank": float(here.rank) if spoil == "its own" else 0.0}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            "a sum for a mean",
            r"^ranks 0, 1 of 2 did not .* 2 of 3 values differ on rank 0\.\n  result\['weights'\]\['weight'\]: "
            r"Tensor-likes are not close! Mismatched .* at index \(\d, \d\).*\n.*\nAll ranks agree",
        ),
        (
            "its own",
            r"^rank 1 of 2 did not .*\n  result\['rank'\]: .*Expected 0.0 but got 1.0.*\nRanks differ from each other",
        ),
        ("its own order", r"All ranks agree\. After setup\(\) the order .* by design: .*setup\(batch=\"global\"\)"),
        ("no seed", "One process does not repeat itself either: give the trainer a seed"),
    ],
)
def test_a_training_that_differs_is_named(spoil: str, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        assert_same_training(lambda: _train(spoil), deadline_s=patience(DEADLINE_S))


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        ([torch.tensor([1.0, 100.0])], [torch.tensor([1.0005, 100.0])], None),
        ([torch.tensor([1.0, 9.0])], [torch.tensor([1.0, 9.1])], "result[0]: Tensor-likes are not close!"),
        ({"a": 1e-9}, {"a": 3e-9}, None),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}, "result['a']: The values for attribute 'shape' do not match"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2).double()}, "result['a']: The values for attribute 'dtype' do not"),
        ({"a": torch.tensor(3)}, {"a": torch.tensor(4)}, "result['a']: Scalars are not equal!"),
        ({"a": 1.0, "b": 2}, {"a": 1.0}, "result['b']: only in one process"),
        ({"a": 1.0}, {"a": 1.0, "b": 2}, "result['b']: only on the rank"),
        ({"a": 2}, {"a": 3}, "result['a']: 2 became 3"),
        ([torch.tensor([1.0, math.nan])], [torch.tensor([1.0, math.nan])], "result[0]: Tensor-likes are not close!"),
        ([torch.tensor([1.0, math.inf])], [torch.tensor([2.0, math.inf])], "result[0]: Tensor-likes are not close!"),
        ([torch.tensor([1.0, -math.inf])], [torch.tensor([1.0, -math.inf])], None),
        (nn.Linear(1, 1, bias=False), {"weight": torch.full((1, 1), 9.0)}, "result['weight']: Tensor-likes are not"),
    ],
)
def test_what_is_compared(one: Any, other: Any, line: Optional[str]) -> None:
    lines = list(_compared(dict(_leaves(one, "result")), dict(_leaves(other, "result")), 1e-5))
    assert lines == [] if line is None else [each[: len(line)] for each in lines] == [line]
