"""Processes that train each for themselves end at the first step of an optimizer; whoever shares gradients does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim
from ddpshim.errors import SyncError
from ddpshim.failures import failure
from ddpshim.process import job
from tests.preloaded import START_DEADLINE_S, environment, start_afresh
from tests.ranks import errors_of, run_ranks

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def _train(net: Any, optimizer: Any = None, share: Any = None) -> int:
    """How many steps were made, of two."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(4, 2)).sum().backward()
        if share is not None:
            for parameter in net.parameters():
                share(parameter.grad)
        optimizer.step()
    return 2


def _with_a_world() -> dict[str, str]:
    def by_loader() -> None:
        net = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(net.parameters())
        for (x,) in ddpshim.make_loader(TensorDataset(torch.ones(16, 2)), 4):
            net(x).sum().backward()
            optimizer.step()

    def by_hand_alone() -> None:
        net = nn.Linear(2, 1)
        for _ in range(2):
            net(torch.ones(4, 2)).sum().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]

    def looks_at_gradients() -> None:
        net = nn.Linear(2, 1)
        for _ in range(3):
            net(torch.ones(4, 2)).sum().backward()

    def forgotten() -> None:
        ddpshim.wrap_parallel(nn.Linear(2, 1))
        _train(nn.Linear(2, 1))

    ways = {
        "loader alone": by_loader,
        "setup alone": lambda: _train(nn.Linear(2, 1)),
        "own step": lambda: _train(net := nn.Linear(2, 1), _OwnStep(net.parameters(), {})),
        "updates by hand": by_hand_alone,
        "looks at gradients": looks_at_gradients,
        "two networks": forgotten,
        "wrapped": lambda: _train(ddpshim.wrap_parallel(nn.Linear(2, 1))),
        "by hand": lambda: _train(nn.Linear(2, 1), share=dist.all_reduce),
        "torch's": lambda: _train(nn.parallel.DistributedDataParallel(nn.Linear(2, 1))),
    }
    return dict(zip(ways, errors_of(ways.values())))


class _OwnStep(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)


@pytest.mark.ranks
def test_after_setup_gradients_have_to_be_shared() -> None:
    for found in run_ranks(_with_a_world, 2):
        alone = {name for name, error in found.items() if "no network was wrapped by wrap_parallel" in error}
        assert alone == {"loader alone", "setup alone", "own step", "updates by hand"}
        assert "weights changed between two backward passes without an optimizer" in found["updates by hand"]
        assert "in no wrapped module" in found.pop("two networks")
        assert {name for name, error in found.items() if not error} == {
            *("wrapped", "by hand", "torch's", "looks at gradients")
        }


@pytest.mark.ranks
def test_after_setup_the_guard_can_be_off_and_one_process_is_alone() -> None:
    assert run_ranks(_train_one, 1) == [2]
    assert run_ranks(_train_one, 2, environ={"DDPSHIM_GUARD": "0"}) == [2, 2]


def _train_one() -> int:
    return _train(nn.Linear(2, 1))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that somebody launched as one of two, and that has no job."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    job.begin_next()
    failure.begin_checks()
    job.current().num_collectives = None
    yield
    job.leave(job.current())


@pytest.mark.unit
@pytest.mark.usefixtures("launched")
def test_a_program_that_nothing_distributes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SyncError, match=r"SGD.step\(\): nothing has distributed this program.*2 processes would train"):
        _train_one()
    with pytest.raises(SyncError):
        torch.optim.LBFGS(nn.Linear(2, 1).parameters()).step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    optimizer.step()  # there is nothing to step on
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _train_one() == 2


@pytest.mark.unit
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("name", ["horovod", "mpi4py", "deepspeed", "DDPSHIM_GUARD"])
def test_a_program_that_distributes_itself_otherwise_or_trains_several_models(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.isupper():
        monkeypatch.setenv(name, "0")
    else:
        monkeypatch.setitem(sys.modules, name, sys)
    assert _train_one() == 2


@pytest.mark.ranks
def test_a_task_of_srun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    step = {"JOB_ID": 42, "STEP_ID": 0, "NTASKS": 2, "STEP_NUM_TASKS": 2, "PROCID": 1, "LOCALID": 1, "NODEID": 0}
    variables = {"SLURM_STEP_TASKS_PER_NODE": "2", **{f"SLURM_{name}": str(value) for name, value in step.items()}}
    environ = {**environment(), **variables, "GLOO_SOCKET_IFNAME": "lo", "DDPSHIM_UNEDITED": "off"}
    code, said = start_afresh(["-m", "ddpshim.launch.rank", "train.py"], environ, tmp_path, START_DEADLINE_S)
    assert code == 1
    assert "rank 1 failed:" in said
    assert "2 processes would train 2 separate models" in said
    assert "trained" not in said


PLAIN = """
import torch
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net(torch.ones(4, 2)).sum().backward()
optimizer.step()
print("trained")
"""


BY_HAND = """
import torch
net = torch.nn.Linear(2, 1)
for _ in range(2):
    net(torch.ones(4, 2)).sum().backward()
    for parameter in net.parameters():
        parameter.data -= 0.1 * parameter.grad
print("trained")
"""


@pytest.mark.ranks
def test_a_program_for_one_process_that_is_left_alone_under_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_HAND)
    command, environ = ["-m", "ddpshim", "run", "--nproc", "2", "train.py"], {"DDPSHIM_UNEDITED": "off"}
    code, said = start_afresh(command, {**environment(), **environ}, tmp_path, START_DEADLINE_S)
    assert code == 1
    what = "weights changed between two backward passes without an optimizer"
    assert f"{what}: nothing has distributed this program" in said
    assert "Start an unmodified single-process trainer by `DDPSHIM_UNEDITED=on python -m ddpshim run" in said
    assert "trained" not in said


@pytest.mark.unit
@pytest.mark.usefixtures("launched")
def test_a_program_with_a_group_of_its_own(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert _train(nn.parallel.DistributedDataParallel(nn.Linear(2, 1))) == 2
    finally:
        dist.destroy_process_group()
