"""A job after another in one process: nothing of the first one counts in the second, and nothing of it stays."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sized
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim
from tests.preloaded import as_torchrun_says
from tests.ranks import run_ranks

NUM_JOBS, NUM_STEPS, B = 4, 3, 8


def _sizes() -> dict[str, Any]:
    """How much every module of ddpshim holds in its variables, and in those of its states."""
    sizes: dict[str, Any] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module is None or module_name.partition(".")[0] != "ddpshim":
            continue
        held = dict(vars(module))
        for name, value in vars(module).items():
            if type(value).__module__ == module_name and hasattr(value, "__dict__"):
                held.update({f"{name}.{inner}": of for inner, of in vars(value).items()})
        for name, value in held.items():
            if isinstance(value, Sized) and not isinstance(value, (str, bytes, torch.Tensor)):
                sizes[f"{module_name}.{name}"] = len(value)
    return sizes


def _objects() -> Counter[str]:
    """How many objects of ddpshim's types there are."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    ours = (kind for kind in kinds if str(kind.__module__).startswith("ddpshim"))
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in ours)


def _train(folder: Path) -> tuple[list[float], list[float]]:
    """The losses of this rank, and the weights at the end, of a job that uses what a trainer uses."""
    net = nn.Sequential(nn.Linear(4, 7), nn.Dropout(0.5), nn.BatchNorm1d(7), nn.Linear(7, 2))
    target = nn.Linear(4, 2).requires_grad_(False)
    second = nn.Linear(4, 2)
    wrapped, also = ddpshim.wrap_parallel(net), ddpshim.wrap_parallel(second)
    ddpshim.wrap_parallel(target)
    optimizer = torch.optim.AdamW([*net.parameters(), *second.parameters()], lr=1e-2)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(NUM_STEPS * B, 4, generator=drawn))
    loader = ddpshim.make_loader(data, B, shuffle=True)
    progress = ddpshim.Resumable(folder / "progress", {"net": wrapped, "optimizer": optimizer}, every_n_steps=2)
    losses = []
    with ddpshim.record(folder), ddpshim.profile():
        for (x,) in progress.steps(loader, 0):
            optimizer.zero_grad()
            loss = (wrapped(x) - target(x)).pow(2).mean() + (also(x) - torch.randn(())).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ddpshim.check_equal_steps()
    return losses, torch.cat([p.detach().flatten() for p in (*net.parameters(), *second.parameters())]).tolist()


def _rank_has_jobs(places: list[dict[str, str]]) -> list[Any]:
    """What each of the jobs gave and left, in groups of ddpshim's own, or with no port in the launcher's."""
    rank, found = dist.get_rank(), []
    asked: dict[str, Any] = {"device": "cpu", "seed": 3}
    ddpshim.cleanup()
    if places:
        dist.destroy_process_group()
        os.environ.update(places[rank])
    for _ in range(NUM_JOBS):
        here = ddpshim.setup(**asked)
        with tempfile.TemporaryDirectory() as folder:
            trained = _train(here.broadcast(Path(folder)))
            here.barrier()  # ranks share the main rank's folder
        ddpshim.cleanup()
        found.append((trained, _sizes(), _objects()))
    return found


@pytest.mark.parametrize("is_adopted", [True, False])
def test_every_job_of_a_process_is_the_same_experiment(is_adopted: bool) -> None:
    ranks = run_ranks(_rank_has_jobs, 2, [] if is_adopted else as_torchrun_says(2))
    (losses, weights), _, _ = ranks[0][0]
    assert len(losses) == NUM_STEPS
    assert ranks[1][0][0][0] != losses, "each rank has its own samples and noise"
    for first, *later in ranks:
        assert first[0][1] == weights
        for trained, sizes, objects in later:
            assert trained == first[0]
            # What the first one left stays one: the World that was left, lines that are said once.
            assert {name: size for name, size in sizes.items() if size != first[1][name]} == {}
            assert objects - first[2] == Counter()


def _rank_is_asked_to_leave(folder: Path, places: list[dict[str, str]]) -> list[Any]:
    """The exit codes of six jobs, of which the first and the fourth are asked to leave, and who listens after them."""
    rank, left = dist.get_rank(), []
    ddpshim.cleanup()
    dist.destroy_process_group()
    asked = {0: signal.SIGTERM, 3: signal.SIGUSR1}
    for job in range(6):
        os.environ.update(places[rank])
        here = ddpshim.setup(device="cpu")
        progress = ddpshim.Resumable(folder / str(job), {})
        loader = ddpshim.make_loader(TensorDataset(torch.zeros(400)), 2)
        if job in asked:
            os.kill(os.getpid(), asked[job])
        try:
            for _ in progress.steps(loader, 0):
                here.barrier()
            left.append(0)
        except SystemExit as error:
            left.append(error.code)
        ddpshim.cleanup()
    return [*left, *(signal.getsignal(number) == signal.SIG_DFL for number in asked.values())]


def test_a_signal_to_one_job_does_not_end_the_next(tmp_path: Path) -> None:
    assert (
        run_ranks(_rank_is_asked_to_leave, 2, tmp_path, as_torchrun_says(2)) == [[75, 0, 0, 75, 0, 0, True, True]] * 2
    )
