"""Measures a step's CPU time on two gloo ranks: `wrap_parallel`, hand-written DDP and other libraries' wrappers.

    python -m evidence.step [--quick]

All arms start from the same weights, get the same batches and make the same steps; their weights are compared bit by
bit at the end. A library that is not installed is left out (requirements/benchmarks.txt). ddpshim's guards are on.
"""

from __future__ import annotations

import importlib.util
import os
import time
import warnings
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpshim
from ddpshim.model import checksums, guard
from ddpshim.process.job import current
from evidence.results import Result, alternate, main, median_and_quartiles, ratio
from tests.ranks import free_port, run_ranks

D_OBS, D_ACTION, BATCH_SIZE_PER_RANK = 64, 14, 64
POLICIES = {"0.2M": (3, 180), "5M": (3, 960), "20M": (4, 1630)}  # layers of each net, and their width
NUM_LAYERS = (8, 40, 100)  # of policies with many small layers, each followed by BatchNorm
PEERS = {"ignite": "ignite", "accelerate": "accelerate", "fabric": "lightning_fabric"}


def policy(kind: str) -> nn.ModuleDict:
    """Return an observation encoder and a noise net, as in DROID's guide; `kind`: the size, or a number of layers."""
    layers: list[nn.Module] = []
    if kind in POLICIES:
        num_layers, width = POLICIES[kind]
        for number in range(2 * num_layers):
            layers += [nn.Linear(width if number else D_OBS, width), nn.ReLU()]
    else:
        width = 64
        for number in range(int(kind)):
            layers += [nn.Linear(width if number else D_OBS, width), nn.BatchNorm1d(width), nn.ReLU()]
    half = len(layers) // 2
    nets = {"encoder": layers[:half], "noise_net": [*layers[half:], nn.Linear(width, D_ACTION)]}
    return nn.ModuleDict({name: nn.Sequential(*net) for name, net in nets.items()})


class Both(nn.Module):
    """The two nets in one module with a `forward`, which other libraries' wrappers need."""

    def __init__(self, nets: nn.ModuleDict) -> None:
        super().__init__()
        self.nets = nets

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nets["noise_net"](self.nets["encoder"](x))  # type: ignore[no-any-return]


def _two(nets: nn.ModuleDict, **options: Any) -> nn.Module:
    return Both(nn.ModuleDict({name: DistributedDataParallel(net, **options) for name, net in nets.items()}))


def _ignite(nets: nn.ModuleDict) -> nn.Module:
    import ignite.distributed as idist

    return idist.auto_model(Both(nets))  # type: ignore[no-any-return]


def _accelerate(nets: nn.ModuleDict) -> nn.Module:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(Both(nets))  # type: ignore[no-any-return]


def _fabric(nets: nn.ModuleDict) -> nn.Module:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=dist.get_world_size())
    fabric.launch()
    return fabric.setup_module(Both(nets))


# Rounds, and steps of an arm per round. A turn takes a fraction of a second: other programs slow all arms alike.
ROUNDS = {"0.2M": (60, 12), "5M": (48, 2), "20M": (32, 1), "8": (60, 8), "40": (48, 4), "100": (40, 2)}
ARMS: dict[str, Callable[[nn.ModuleDict], nn.Module]] = {
    "no sync": Both,
    "raw DDP": lambda nets: DistributedDataParallel(Both(nets)),
    "two wraps": _two,
    "two wraps, unused": lambda nets: _two(nets, find_unused_parameters=True),
    "ignite": _ignite,
    "accelerate": _accelerate,
    "fabric": _fabric,
    "ddpshim": lambda nets: Both(ddpshim.wrap_parallel(nets, sync_batchnorm=False)),  # as in the other arms
}


def available(arms: list[str]) -> list[str]:
    """Return those of `arms` whose package is installed."""
    return [arm for arm in arms if arm not in PEERS or importlib.util.find_spec(PEERS[arm]) is not None]


def switch_guards(are_on: bool) -> None:
    """Turn the check of optimizer steps on or off: it would refuse the other arms, which ddpshim does not wrap."""
    (guard.watch_optimizers if are_on else current().part(guard.Watched).unwatch_optimizers)()


def checksum(net: nn.Module) -> str:
    """Return a checksum of the bits of all weights."""
    return str([checksums.numbers_of(p)[0] for p in net.parameters()])


class _Arm:
    """A policy, wrapped as in the arm `name`, and its optimizer."""

    def __init__(self, name: str, kind: str) -> None:
        self.is_ours = name == "ddpshim"
        with ddpshim.shared_random_streams(0):
            nets = policy(kind)
        self.net = ARMS[name](nets)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)
        self._batches = torch.Generator().manual_seed(dist.get_rank())

    def run(self, num_steps: int) -> float:
        """Make `num_steps` steps; return the CPU seconds of one, for all threads of this process together."""
        x = torch.randn(BATCH_SIZE_PER_RANK, D_OBS, generator=self._batches)
        switch_guards(self.is_ours)
        start = time.process_time()
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.net(x).pow(2).mean().backward()
            self.optimizer.step()
        return (time.process_time() - start) / num_steps


def measure(kind: str, names: list[str], num_rounds: int, steps_per_round: int) -> dict[str, Any]:
    """Return the CPU seconds of a step by arm and round, mean over ranks, and the checksums (collective)."""
    warnings.simplefilter("ignore")  # from other libraries
    here = ddpshim.world()
    os.environ.update(RANK=str(here.rank), LOCAL_RANK=str(here.rank), WORLD_SIZE=str(here.world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(here.world_size), NODE_RANK="0", GROUP_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.update(TORCHELASTIC_RUN_ID="benchmark", MASTER_PORT=os.environ.get("MASTER_PORT", "29500"))
    arms = {name: _Arm(name, kind) for name in names}
    for arm in arms.values():
        arm.run(3)
    found = alternate({name: lambda arm=arm: arm.run(steps_per_round) for name, arm in arms.items()}, num_rounds)
    means = {name: here.gather(seconds) for name, seconds in found.items()}
    return {
        "seconds": {name: [sum(ranks) / len(ranks) for ranks in zip(*every)] for name, every in means.items()},
        "checksums": {name: here.gather(checksum(arm.net)) for name, arm in arms.items()},
    }


def _results(kind: str, got: dict[str, Any]) -> list[Result]:
    seconds, checksums = got["seconds"], got["checksums"]
    synced = {name: sums for name, sums in checksums.items() if name != "no sync"}
    one = len({text for sums in synced.values() for text in sums}) == 1
    note = "" if one else f"WEIGHTS DIFFER: {sorted(synced)}"
    what = f"CPU time of a step, {kind} {'parameters' if kind in POLICIES else 'layers with BatchNorm'}"
    out = []
    targets = {"raw DDP": 1.0, "two wraps": 0.95, **dict.fromkeys(PEERS, 1.0)}
    for name in [name for name in seconds if name != "ddpshim"]:
        middle, quartiles = ratio(seconds["ddpshim"], seconds[name])
        out.append(Result("step", what, middle, f"x {name}", quartiles, targets.get(name), note=note))
    middle, quartiles = median_and_quartiles([s * 1000 for s in seconds["ddpshim"]])
    out.append(Result("step", what, middle, "ms", quartiles))
    return out


def run(quick: bool) -> list[Result]:
    """Measure the steps of every policy; `quick`: fewer rounds, and small policies only."""
    kinds = ["0.2M", "40"] if quick else [*POLICIES, *map(str, NUM_LAYERS)]
    names = available(list(ARMS))
    out = []
    for kind in kinds:
        rounds, steps = (8, 6) if quick else ROUNDS[kind]
        port = {"MASTER_PORT": str(free_port())}
        out += _results(kind, run_ranks(measure, 2, kind, names, rounds, steps, timeout_s=280, environ=port)[0])
    return out


if __name__ == "__main__":
    main(run, __doc__)
