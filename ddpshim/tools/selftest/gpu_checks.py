"""Runs one rank of the self-test on GPUs: checks what only fails on GPUs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import random
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ddpshim import checkpoint
from ddpshim.checkpoint.resume import Resumable
from ddpshim.data.loader import make_loader
from ddpshim.errors import CheckpointError, SyncError
from ddpshim.model import guard
from ddpshim.model.parallel import wrap_parallel
from ddpshim.process.replaced import replaced
from ddpshim.process.seeds import seed_everything
from ddpshim.tools.selftest.checks import CHECKS as OF_ANY_MACHINE
from ddpshim.tools.selftest.checks import NotRun, Place, run_checks
from ddpshim.tools.selftest.gpu_machine import GpuMachine, built, is_simulated
from ddpshim.tools.selftest.policies import (
    KINDS,
    OBS_DIM,
    ODD_CALLS,
    ActorCritic,
    Recurrent,
    Transformer,
    TwoBranches,
    data,
)

_SEED = 1
_BATCH_SIZE_PER_RANK = 4
_NUM_STEPS = 6
_SAVED_AT = 2
# Largest difference of a weight, relative to the largest change of a weight. float64: rounding; float32: rounding of
# kernels that sum in another order, without TF32. A gradient that is not reduced gives 0.02 in the RNN.
_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}
_ONE_PROCESS = "one_process.pt"
_NUM_WARM_UP_STEPS = 16  # guards compare the weights of steps 1, 2 and 10 within four steps
_NUM_LATE_STEPS = 12  # a planted difference must be reported within these: on a GPU guards read their numbers later
_ENVIRON = {  # set before CUDA starts: no TF32 in float32, and the same results in each run
    "NVIDIA_TF32_OVERRIDE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def run_rank(place: Place, out: Connection) -> None:
    """Run the checks of `place` and send an Outcome of each. Must run in a process of its own."""
    os.environ.update(_ENVIRON)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    table: Mapping[str, Callable[[Any], str]] = {**OF_ANY_MACHINE, **CHECKS}
    run_checks(GpuRank, table, place, out)


class GpuRank(GpuMachine):
    """A rank with the checks that compare its training with one process."""

    @property
    def _batch_size(self) -> int:
        return _BATCH_SIZE_PER_RANK * self.place.num_ranks

    @property
    def _one_process(self) -> Path:
        return Path(self.place.folder) / _ONE_PROCESS

    def one_process(self) -> str:
        """Train the reference for the ranks in plain torch, without ddpshim, and save it."""
        kept: dict[str, Any] = {}
        for kind, dtype in itertools.product(KINDS, _LIMITS):
            seed_everything(_SEED)
            net = KINDS[kind]().to(self.world.device, dtype)
            start = [p.detach().clone() for p in net.parameters()]
            loader = DataLoader(TensorDataset(*self._data(dtype)), self._batch_size, shuffle=True, drop_last=True)
            _train(net, loader, self.world.device)
            moved = max(float((p.detach() - q).abs().max()) for p, q in zip(net.parameters(), start))
            kept[f"{kind}, {dtype}"] = ({name: value.cpu() for name, value in net.state_dict().items()}, moved)
        torch.save(kept, self._one_process)
        return f"{len(kept)} trainings of {_NUM_STEPS} steps, batch {self._batch_size}, without ddpshim"

    def experiment(self, kind: str) -> str:
        """Train a policy on all ranks, and compare the weights with those of one process on a GPU."""
        said = []
        for dtype in _LIMITS:
            seed_everything(_SEED)
            net = KINDS[kind]().to(self.world.device, dtype)
            wrapped: Any = wrap_parallel(net)
            loader = make_loader(TensorDataset(*self._data(dtype)), self._batch_size, shuffle=True)
            _train(wrapped, loader, self.world.device)
            said.append(self._compared(kind, dtype, net))
        return "of the largest change, a weight differs by at most " + " and ".join(said)

    def _compared(self, kind: str, dtype: torch.dtype, net: nn.Module) -> str:
        """Return, as text, the largest difference of weights and buffers from one process, relative to their change.

        Collective. Raises SyncError on the rank with the largest difference, if it is above the limit.
        """
        expected, moved = torch.load(self._one_process, weights_only=True)[f"{kind}, {dtype}"]
        apart = {
            name: float((value.cpu().double() - expected[name].double()).abs().max()) / moved
            for name, value in net.state_dict().items()
        }
        name, largest = max(apart.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
        every = self.world.gather(math.inf if math.isnan(largest) else largest)
        limit, short = _LIMITS[dtype], str(dtype).replace("torch.", "")
        # A wrong rank also changes the others, through averaged gradients: report the one with the largest difference.
        if max(every) >= limit and every.index(max(every)) == self.world.rank:
            raise SyncError(
                f"{kind} in {short}: after {_NUM_STEPS} steps {name} differs from one process by {largest:.1e} of the "
                f"largest change of a weight (expected below {limit:.0e}); this machine would train another model. "
                "Report this with the file that --write makes."
            )
        return f"{max(every):.0e} in {short} (limit {limit:.0e})"

    def odd_calls(self) -> str:
        for name, (make, arguments) in ODD_CALLS.items():
            bare, other = (built(make, self.world.device) for _ in range(2))
            wrapped: Any = wrap_parallel(other)
            found, expected = wrapped(*arguments(self.world.device)), bare(*arguments(self.world.device))
            (found.sum() + 0.0).backward()
            (expected.sum() + 0.0).backward()
            pairs = [("the output", found, expected)]
            pairs += [(n, p.grad, q.grad) for (n, p), q in zip(wrapped.module.named_parameters(), bare.parameters())]
            for what, a, b in pairs:
                if a is None or b is None or not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
                    raise SyncError(
                        f"a call with {name}: {what} is not that of the bare network; policies that are called so "
                        "would train another model. Report this with the file that --write makes."
                    )
        return f"as the bare network: {', '.join(ODD_CALLS)}"

    def branches(self) -> str:
        """Train five networks in one backward pass, where some ranks skip a branch of each."""
        nets, alone = ([built(TwoBranches, self.world.device).double() for _ in range(5)] for _ in range(2))
        wrapped = [wrap_parallel(net) for net in nets]
        size = self.world.world_size
        for step in range(4):
            shares = [_share(rank, step).to(self.world.device) for rank in range(size)]

            def loss(networks: list[Any], rank: int, step: int = step, shares: list[Tensor] = shares) -> Tensor:
                left_out = [(number + rank + step) % size == 0 for number in range(5)]
                parts = [net(shares[rank], out) for net, out in zip(networks, left_out)]
                return torch.stack([part.square().mean() for part in parts]).sum()

            for net in [*nets, *alone]:
                net.zero_grad()
            loss(wrapped, self.world.rank).backward()
            torch.stack([loss(alone, rank) for rank in range(size)]).mean().backward()
            for number, (net, other) in enumerate(zip(nets, alone)):
                for (name, p), q in zip(net.named_parameters(), other.parameters()):
                    found, expected = (torch.zeros_like(p) if x.grad is None else x.grad for x in (p, q))
                    if not torch.allclose(found, expected, rtol=1e-9, atol=1e-12):
                        raise SyncError(
                            f"network {number}, step {step}: the gradient of {name} is not that of one process, where "
                            "ranks left out different branches; buckets of two networks were added to each other. "
                            "Report this with the file that --write makes."
                        )
        return "5 networks in one backward pass, each with a branch that some ranks leave out: gradients of one process"

    def no_syncs(self) -> str:
        for kind in (Transformer, ActorCritic):
            wrapped: Any = wrap_parallel(built(kind, self.world.device))
            optimizer = torch.optim.Adam(wrapped.parameters())
            batch = self.on_device(torch.float32)
            for step in range(_NUM_WARM_UP_STEPS + 6):
                with _refused_syncs(step >= _NUM_WARM_UP_STEPS) as reason:
                    if reason:
                        return NotRun(reason)
                    optimizer.zero_grad()
                    wrapped.loss(*batch).backward()
                    optimizer.step()
        return "6 steps of a transformer, and 6 of a network with unused parameters, in which nothing waits for the GPU"

    def streams(self) -> str:
        """Train with delays at random places, which change the result if a gradient is read too early."""
        drawn = random.Random(self.world.rank)
        work = torch.zeros(1024, 1024, device=self.world.device)

        def delay(*_: Any) -> None:
            if drawn.random() < 0.5:
                _occupy(work, drawn.uniform(0.1, 3.0))
            elif drawn.random() < 0.3:
                time.sleep(drawn.uniform(0.0, 0.003))

        said = []
        for kind in ("U-Net", "RNN"):
            seed_everything(_SEED)
            net = KINDS[kind]().to(self.world.device, torch.float64)
            wrapped: Any = wrap_parallel(net, bucket_cap_mb=0.001)
            handles = [p.register_hook(delay) for p in net.parameters()]
            loader = make_loader(TensorDataset(*self._data(torch.float64)), self._batch_size, shuffle=True)
            _train(wrapped, loader, self.world.device)
            for handle in handles:
                handle.remove()
            said.append(self._compared(kind, torch.float64, net))
        return f"U-Net and RNN with random delays on each rank: {' and '.join(said)}"

    def save(self) -> str:
        training, net, loader = self._resumable()
        for batch in training.steps(loader, 0):
            if training.step == _SAVED_AT + 1:
                break
            _step(net[0], net[1], batch, self.world.device)
        checkpoint.flush()
        return f"saved after {_SAVED_AT} of {_NUM_STEPS} steps, on {self.world.world_size} ranks"

    def resume(self) -> str:
        training, net, loader = self._resumable()
        if not training.restore() or training.step != _SAVED_AT:
            raise CheckpointError(
                f"what {self.place.num_ranks} ranks saved after step {_SAVED_AT} was not found, or is from step "
                f"{training.step}; a resumed run would lose steps. Report this with the file that --write makes."
            )
        for batch in training.steps(loader, 0):
            _step(net[0], net[1], batch, self.world.device)
        apart = self._compared("RNN", torch.float64, net[0].module)
        return f"{self.place.num_ranks} ranks saved, {self.world.world_size} went on: {apart} from one process"

    def _resumable(self) -> tuple[Resumable, tuple[Any, Any], Any]:
        seed_everything(_SEED)
        wrapped: Any = wrap_parallel(Recurrent().to(self.world.device, torch.float64))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        folder = Path(self.place.folder) / "resume"
        training = Resumable(folder, {"net": wrapped, "optimizer": optimizer}, every_n_steps=_SAVED_AT)
        loader = make_loader(TensorDataset(*self._data(torch.float64)), self._batch_size, shuffle=True)
        return training, (wrapped, optimizer), loader

    def bites(self, what: str) -> str:
        """Check that guards report a difference that rank 1 plants."""
        wrapped: Any = wrap_parallel(built(Recurrent, self.world.device))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        batch = self.on_device(torch.float32)
        planted_at, is_planter = 3, self.world.rank == 1
        for step in range(planted_at + _NUM_LATE_STEPS):
            try:
                optimizer.zero_grad()
                wrapped.loss(*batch).backward()
                optimizer.step()
                if step == planted_at and is_planter:
                    if what == "weights":
                        with torch.no_grad():
                            wrapped.module.head.weight[0, 0] += 1e-3
                    else:
                        optimizer.step()
                if step >= planted_at and what == "weights":
                    guard.ask()
            except SyncError as error:
                return f"reported {step - planted_at} steps later: {str(error).splitlines()[0][:90]} ..."
        raise SyncError(
            f"rank 1's {what} differ from step {planted_at} on, and no guard said so in {_NUM_LATE_STEPS} steps; ranks "
            "would train different models unnoticed. Report this with the file that --write makes."
        )

    def _data(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return data(self._batch_size * _NUM_STEPS, dtype)


CHECKS: dict[str, Callable[[GpuRank], str]] = {
    "facts": GpuRank.facts,
    "links": GpuRank.links,
    "memory": GpuRank.memory,
    "one process": GpuRank.one_process,
    **{kind: functools.partial(GpuRank.experiment, kind=kind) for kind in KINDS},
    "odd calls": GpuRank.odd_calls,
    "branches": GpuRank.branches,
    "no syncs": GpuRank.no_syncs,
    "streams": GpuRank.streams,
    "save": GpuRank.save,
    "resume": GpuRank.resume,
    "guard: weights": functools.partial(GpuRank.bites, what="weights"),
    "guard: steps": functools.partial(GpuRank.bites, what="steps"),
    "overlap": GpuRank.overlap,
    "rendering": GpuRank.rendering,
}


def _train(net: Any, loader: Any, device: torch.device) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for batch in loader:
        _step(net, optimizer, batch, device)


def _step(net: Any, optimizer: torch.optim.Optimizer, batch: Any, device: torch.device) -> None:
    optimizer.zero_grad()
    net.loss(*(part.to(device) for part in batch)).backward()
    optimizer.step()


@contextlib.contextmanager
def _refused_syncs(is_on: bool) -> Iterator[Optional[str]]:
    """Within this block, each call that waits for the GPU raises; yields the reason if torch cannot do this."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise SyncError(
            "a step waits for the GPU at the end of this traceback; the GPU would be idle until the next kernel. "
            "Report this with the file that --write makes."
        )

    if not is_on:
        yield None
        return
    try:
        torch.cuda.set_sync_debug_mode("error")
    except (AttributeError, RuntimeError) as error:
        yield f"torch.cuda.set_sync_debug_mode does not work here ({type(error).__name__})"
        return
    with contextlib.ExitStack() as stack:
        stack.callback(torch.cuda.set_sync_debug_mode, "default")
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):  # that mode does not cover these
            stack.enter_context(replaced(owner, "synchronize", refuse))
        yield None


def _occupy(work: Tensor, milliseconds: float) -> None:
    """Keep the current stream busy for about `milliseconds` on a current GPU (less on a simulated one)."""
    if is_simulated():
        time.sleep(milliseconds / 1e4)
        return
    with torch.no_grad():
        for _ in range(int(20 * milliseconds)):
            torch.mm(work, work)


def _share(rank: int, step: int) -> Tensor:
    return torch.linspace(rank + step, rank + step + 5, 3 * OBS_DIM, dtype=torch.float64).sin().view(3, OBS_DIM)
