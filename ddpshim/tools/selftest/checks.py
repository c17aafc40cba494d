"""Runs one rank of the self-test: joins the others, then checks each part that training depends on."""

from __future__ import annotations

import copy
import faulthandler
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Callable, NamedTuple, NoReturn, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from ddpshim import checkpoint
from ddpshim.data.loader import make_loader
from ddpshim.errors import CheckpointError, DataError, DdpShimError, SyncError, WorldError
from ddpshim.failures.failure_notes import meaning_of
from ddpshim.job import noise, shares
from ddpshim.job.group import cleanup, setup
from ddpshim.job.world import World
from ddpshim.model.parallel import wrap_parallel
from ddpshim.process.random_streams import shared_random_streams
from ddpshim.process.say import described

_SEED = 1
_NUM_STEPS = 5
_BATCH_SIZE_PER_RANK = 4
_MOST_S = 0.1  # an all-reduce that is expected to take longer is not measured
_LIMIT = 1e-12  # float64 rounding over a few steps; a gradient that is not reduced differs by 1e-3
WATCHDOG_S = 2.0  # after torch's own timeout, whose message is better
_ALONE = World(launcher="selftest")  # one process, launched: the reference for the ranks


@dataclass(frozen=True)
class Place:
    """One rank's place in the self-test.

    Attributes:
        folder: shared by the ranks of a node, for log files and a checkpoint.
        checks: the names of the checks to run, in order; empty: all checks of the device.
        num_ranks: the number of ranks of the whole test on GPUs, also in checks that use one process or fewer ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    device: str
    timeout_s: float
    folder: str
    checks: tuple[str, ...] = ()
    num_ranks: int = 0
    is_quick: bool = True

    @property
    def log(self) -> str:
        """The file that receives the rank's output."""
        return os.path.join(self.folder, f"rank{self.rank}.log")

    def variables(self) -> dict[str, str]:
        """Return the variables that torchrun would set: ranks start as in real jobs, with the parent as the agent."""
        return {
            "DDPSHIM_LAUNCHER": "torchrun",
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }


class NotRun(str):
    """The reason why a check cannot run on this machine; all ranks return it instead of the detail."""


class Outcome(NamedTuple):
    """One rank's result of one check: a `detail` to print, or an `error`."""

    rank: int
    moment: float  # time.time(), which all processes of a machine share
    seconds: float
    detail: str = ""
    error: Optional[str] = None
    is_consequence: bool = False  # the error only says that another rank is missing or has left
    is_not_run: bool = False  # `detail` is the reason


def names(device: str) -> list[str]:
    """Return the names of the checks for `device`, in the order of running."""
    return [name for name in CHECKS if name != "peer-to-peer" or device == "cuda"]


def run_rank(place: Place, out: Connection) -> None:
    """Run the checks up to the first failure and send an Outcome of each. Must run in a process of its own."""
    run_checks(Rank, CHECKS, place, out)


def run_checks(kind: type[Rank], table: Mapping[str, Callable[[Any], str]], place: Place, out: Connection) -> None:
    """Do the same as `run_rank`, with the checks of `table` on an object of class `kind`."""
    log = open(place.log, "w")  # noqa: SIM115 - for as long as the process lives
    for stream in (1, 2):  # the file descriptors, so that output of C++ libraries is logged too
        os.dup2(log.fileno(), stream)
    os.environ.update(place.variables())
    torch.set_num_threads(1)
    rank = kind(place)
    for name in place.checks or names(place.device):
        faulthandler.dump_traceback_later(place.timeout_s + WATCHDOG_S, exit=True, file=log)
        started = time.perf_counter()
        try:
            detail = table[name](rank)
            rank.settle()
        except BaseException as error:
            _fail(place, out, error, time.perf_counter() - started)
        is_not_run, seconds = isinstance(detail, NotRun), time.perf_counter() - started
        out.send(Outcome(place.rank, time.time(), seconds, str(detail), is_not_run=is_not_run))
    rank.world.barrier()
    cleanup()
    faulthandler.cancel_dump_traceback_later()


def _fail(place: Place, out: Connection, error: BaseException, seconds: float) -> NoReturn:
    text = str(error) if isinstance(error, DdpShimError) else described(error)
    has_waited = meaning_of(text) is not None or "imed out" in text or "timeout" in text  # the last two: the store
    is_consequence = "first_failure" in error.__dict__ or has_waited
    if not is_consequence and not isinstance(error, DdpShimError):
        text = traceback.format_exc()
    out.send(Outcome(place.rank, time.time(), seconds, error=text.strip(), is_consequence=is_consequence))
    os._exit(1)  # teardown would wait for peers


class _Net(nn.Module):
    """A network trained through a method other than forward, as robomimic's are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """inputs: (B, 6), targets: (B, 1)."""
        return nn.functional.mse_loss(self.layers(inputs), targets)


class Rank:
    """One rank: its checks, and the state that they share."""

    world: World
    wrapped: Any

    def __init__(self, place: Place) -> None:
        self.place = place

    def settle(self) -> None:
        """Wait for the GPU, so that an error is reported by the check that caused it."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def rendezvous(self) -> str:
        timeout_s = self.place.timeout_s
        self.world = setup(device=self.place.device, seed=_SEED, timeout_s=timeout_s, side_timeout_s=timeout_s)
        self.world.barrier()
        at = f"{self.place.master_addr}:{self.place.master_port}"
        return f"{self.world.backend} on {self.world.device.type}, through {at}"

    def collectives(self) -> str:
        here, size = self.world, self.world.world_size
        everyone = list(range(size))
        _expect("gather", here.gather(here.rank), everyone)
        _expect("broadcast from each rank", [here.broadcast(here.rank, src) for src in everyone], everyone)
        _expect("sum of integers", here.sum(2**60 + here.rank), size * 2**60 + sum(everyone))
        _expect("sum of floats", here.sum(0.1 * (here.rank + 1)), math.fsum(0.1 * (rank + 1) for rank in everyone))
        _expect("sum of a tensor", here.sum(torch.tensor([1, here.rank])).tolist(), [size, sum(everyone)])
        _expect("run_on_main", here.run_on_main(lambda: int(os.environ["RANK"])), 0)
        here.barrier()
        return "gather, broadcast, sum, run_on_main, barrier"

    def all_reduce(self) -> str:
        here, size = self.world, self.world.world_size
        latency_s = self._seconds_each(torch.zeros(1, device=here.device), 20)
        measured: list[str] = []
        before, seconds = 4, 0.0
        for megabytes in (4, 64, 256) if here.backend == "nccl" else (4,):
            if max(here.gather(seconds)) * megabytes / before > _MOST_S:
                break
            before = megabytes
            # Integers far below 2**24, so their sums are exact in float32.
            pattern = (torch.arange(megabytes * 250_000, device=here.device) % 251).float()
            reduced = pattern * (here.rank + 1)
            dist.all_reduce(reduced)
            num_wrong = int((reduced != pattern * (size * (size + 1) // 2)).sum())
            if num_wrong:
                raise WorldError(
                    f"all-reduce of {megabytes} MB over {here.backend} gave {num_wrong} wrong numbers of "
                    f"{len(pattern)}; gradients would be wrong. Try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, to "
                    "find the faulty link."
                )
            seconds = self._seconds_each(pattern.zero_(), 3 if megabytes == 4 else 10)
            # The bus bandwidth of nccl-tests: the rate on each link, comparable for any number of ranks.
            bandwidth = 2 * (size - 1) / size * 4 * len(pattern) / seconds / 1e9
            measured.append(f"{bandwidth:.1f} GB/s at {megabytes} MB")
        return f"latency {latency_s * 1e3:.2f} ms, bus bandwidth {', '.join(measured)}"

    def _seconds_each(self, tensor: torch.Tensor, num_rounds: int) -> float:
        wait: Callable[[], Any] = torch.cuda.synchronize if tensor.is_cuda else int
        for _ in range(2):  # connections are made in the first one
            dist.all_reduce(tensor)
        wait()
        started = time.perf_counter()
        for _ in range(num_rounds):
            dist.all_reduce(tensor)
        wait()
        return (time.perf_counter() - started) / num_rounds

    def peer_to_peer(self) -> str:
        if self.world.local_rank != 0:
            return ""  # one rank tries all pairs of its node
        num_gpus = torch.cuda.device_count()
        pairs = [(a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b]
        sent = torch.arange(4 * 2**20, dtype=torch.int32)
        for a, b in pairs:
            arrived = sent.to(f"cuda:{a}").to(f"cuda:{b}").cpu()
            num_wrong = int((arrived != sent).sum())
            if num_wrong:
                raise WorldError(
                    f"a copy from cuda:{a} to cuda:{b} changed {num_wrong} numbers of {len(sent)}; gradients would "
                    "be wrong. Set NCCL_P2P_DISABLE=1, and check the board's IOMMU and PCIe ACS settings."
                )
        direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        return f"{direct} of {len(pairs)} pairs direct, every copy whole" if pairs else "one GPU, nothing to copy"

    def sharding(self) -> str:
        batches, alone = self._batches(self.world), self._batches(_ALONE)
        size, rank = self.world.world_size, self.world.rank
        for epoch, whole in enumerate(alone):
            _expect_samples(f"epoch {epoch}", batches[epoch], [batch[rank::size] for batch in whole])
        seen = sorted(sample for batch in alone[0] for sample in batch)
        if seen != list(range(len(seen))):
            raise DataError(f"one pass gave samples {seen}, not each once; data would be missed. Report this as a bug.")
        if alone[0] == alone[1]:
            raise DataError(
                "two epochs had the same order; every epoch would have the same batches. Report this as a bug."
            )
        if "fork" in multiprocessing.get_all_start_methods():  # others import torch in each worker: seconds
            from_worker = self._batches(self.world, num_workers=1, multiprocessing_context="fork")
            _expect_samples("from a data worker", from_worker[0], batches[0])
        num_batches = sum(map(len, alone))
        return f"{num_batches} global batches of {size * _BATCH_SIZE_PER_RANK} as one process has them"

    def _batches(self, world: World, **options: Any) -> list[list[list[int]]]:
        """Return [epoch][batch] -> this rank's samples in `world`, for two epochs."""
        size = self.world.world_size * _BATCH_SIZE_PER_RANK
        dataset = TensorDataset(torch.arange(size * _NUM_STEPS))
        with shared_random_streams(_SEED):
            loader = make_loader(dataset, batch_size=size, shuffle=True, seed=_SEED, world=world, **options)
            return [[batch[0].tolist() for batch in loader] for _ in range(2)]

    def training(self) -> str:
        with shared_random_streams(_SEED):
            net = _Net()
        alone = copy.deepcopy(net)
        self._train(alone, _ALONE, torch.device("cpu"))
        self.wrapped = wrap_parallel(net.to(self.world.device))
        self._train(self.wrapped, self.world, self.world.device)
        pairs = zip(net.named_parameters(), alone.parameters())
        difference, name = max((float((p.detach().cpu() - q.detach()).abs().max()), n) for (n, p), q in pairs)
        differences = self.world.gather(math.inf if math.isnan(difference) else difference)
        largest = max(differences)
        # A wrong rank also changes the others, through averaged gradients: report the one with the largest difference.
        if largest >= _LIMIT and differences.index(largest) == self.world.rank:
            raise SyncError(
                f"after {_NUM_STEPS} steps {name} differs by {difference:.1e} from one process on the whole batch "
                f"(expected below {_LIMIT:.0e}); this rank would train another model. Report this as a bug, with "
                "the output of `python -m ddpshim selftest --env`."
            )
        return f"{_NUM_STEPS} steps in float64, a weight differs by at most {largest:.1e} from one process"

    def _train(self, net: Any, world: World, device: torch.device) -> None:
        size = self.world.world_size * _BATCH_SIZE_PER_RANK
        inputs = torch.linspace(-1, 1, size * _NUM_STEPS * 6, dtype=torch.float64).sin().view(-1, 6)
        targets = (3 * inputs).cos().sum(1, keepdim=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with shared_random_streams(_SEED):
            for batch in make_loader(TensorDataset(inputs, targets), size, shuffle=True, seed=_SEED, world=world):
                optimizer.zero_grad()
                net.loss(*(part.to(device) for part in batch)).backward()
                optimizer.step()

    def noise(self) -> str:
        device, size = self.world.device, self.world.world_size
        with shared_random_streams(_SEED):
            whole = torch.rand(_BATCH_SIZE_PER_RANK * size, device=device)
            after = torch.rand(1, device=device).item()
        noise.share()
        with shared_random_streams(_SEED):
            shares.begin_batch(_BATCH_SIZE_PER_RANK)
            drawn = torch.rand(_BATCH_SIZE_PER_RANK, device=device)
            shares.end_batch()
            next_number = torch.rand(1, device=device).item()
        twins = [rank for rank in range(size) if torch.equal(drawn, whole[rank::size])]
        if twins != [self.world.rank]:
            raise SyncError(
                f"draws {drawn[0]:.6f}, ... for its samples, and one process {whole[self.world.rank]:.6f}, ...; "
                "diffusion steps and dropout would differ, or repeat. Report this as a bug."
            )
        _expect("the number drawn after a batch", next_number, after)
        return "every rank draws for its samples what one process draws for them"

    def checkpoint(self) -> str:
        path = os.path.join(self.place.folder, "last.pth")
        checkpoint.save({"model": self.wrapped.state_dict()}, path)
        if self.world.is_main:
            bare = _Net()
            bare.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model"], strict=True)
            for (name, kept), now in zip(bare.named_parameters(), self.wrapped.module.parameters()):
                if not torch.equal(kept, now.detach().cpu()):
                    raise CheckpointError(
                        f"{name} was changed by saving and loading; a resumed training would "
                        "jump. Report this as a bug."
                    )
        return "saved by rank 0, loaded strictly into the bare network"


CHECKS: dict[str, Callable[[Rank], str]] = {
    "rendezvous": Rank.rendezvous,
    "collectives": Rank.collectives,
    "all-reduce": Rank.all_reduce,
    "peer-to-peer": Rank.peer_to_peer,
    "sharding": Rank.sharding,
    "training": Rank.training,
    "noise": Rank.noise,
    "checkpoint": Rank.checkpoint,
}


def _expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise WorldError(
            f"{what}: found {found}, expected {expected}; metrics and decisions would differ between ranks. "
            "Report this as a bug, with the output of `python -m ddpshim selftest --env`."
        )


def _expect_samples(where: str, found: list[list[int]], expected: list[list[int]]) -> None:
    if found != expected:
        equal = [pair[0] == pair[1] for pair in zip(found, expected)]
        step = equal.index(False) if False in equal else len(equal)
        raise DataError(
            f"{where}, step {step}: found samples {found[step : step + 1]}, expected {expected[step : step + 1]}; some "
            "would be missed or seen twice. Report this as a bug."
        )
