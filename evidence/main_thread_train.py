"""Trains tiny networks through one door, and writes what each part of a step takes of the main thread; main_thread.py.

`python evidence/main_thread_train.py DOOR NETWORKS NUM_STEPS OUT`. OUT: for each network {"ms": milliseconds of CPU of
the main thread by part, "wall_ms": a step's time, "waits": blocking messages of one step by place, "loss": the last
loss}. On a GPU the networks have the widths with which people train them, and a thread that waits for it sleeps.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import json
import os
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evidence import one_process_programs as programs

DEVICE = programs.DEVICE
IS_GPU = DEVICE.type == "cuda"
IS_WIDE = IS_GPU or os.environ.get("MAIN_THREAD_WIDE") == "1"
BATCH_SIZE, NUM_BATCHES, WARM_UP = (32 if IS_WIDE else 8), 50, 30
PARTS = ("load", "noise", "forward", "loss", "zero", "backward", "optimizer", "ema", "read")


class Policy(nn.Module):
    """One of robomimic's actor networks, of observations of 20 numbers and actions of 7."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        from robomimic.config import config_factory
        from robomimic.models import policy_nets as nets
        from robomimic.utils import obs_utils

        config = config_factory("bc")
        with config.unlocked():
            config.observation.modalities.obs.low_dim = ["obs"]
        obs_utils.initialize_obs_utils_with_config(config)
        self.net = getattr(nets, kind)(obs_shapes=OrderedDict(obs=(20,)), ac_dim=7, **options)

    def forward(self, observation: Tensor) -> Any:
        return self.net({"obs": observation})


class Mixture(Policy):
    """Returns the logarithm of the actions' probability."""

    def forward(self, observation: Tensor, actions: Tensor) -> Any:  # type: ignore[override]
        return self.net.forward_train({"obs": observation}).log_prob(actions)


class Residual(nn.Module):
    """A block of ResNet18, of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.last(self.second(F.relu(self.norm(self.first(x))))))


def _make(name: str) -> tuple[nn.Module, list[Tensor]]:
    """Return a network and the data of NUM_BATCHES batches: observations, then actions."""
    num = BATCH_SIZE * NUM_BATCHES
    if name == "unet":
        programs.WIDTHS = (64, 128, 256) if IS_WIDE else (16, 32, 64)
        return programs.UNet(), [torch.randn(num, 20), torch.randn(num, 16, 7)]
    if name == "act":
        width, pixels = (192, 96) if IS_WIDE else (24, 32)
        images = torch.rand(num, 2, 3, pixels, pixels)
        return programs.ACT(width), [torch.randn(num, 14), images, torch.randn(num, 20, 7)]
    if name == "resnet":
        begin = (nn.Conv2d(3, 8, 7, 4, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7))
        return nn.Sequential(*begin, *(Residual() for _ in range(8)), *end), [
            torch.rand(num, 3, 32, 32),
            torch.randn(num, 7),
        ]
    if name == "bc":
        return Policy("ActorNetwork", mlp_layer_dims=[1024, 1024] if IS_WIDE else [64, 64]), [
            torch.randn(num, 20),
            torch.randn(num, 7),
        ]
    sequences = [torch.randn(num, 10, 20), torch.randn(num, 10, 7)]
    if name == "bc_rnn_gmm":
        return Mixture(
            "RNNGMMActorNetwork",
            mlp_layer_dims=[] if IS_WIDE else [64],
            rnn_hidden_dim=400 if IS_WIDE else 32,
            rnn_num_layers=2,
            rnn_kwargs={"bidirectional": False},
        ), sequences
    width, num_layers, num_heads = (512, 6, 8) if IS_WIDE else (32, 4, 4)
    sizes = {"embed_dim": width, "num_layers": num_layers, "num_heads": num_heads, "context_length": 10}
    options = {f"transformer_{name}": size for name, size in sizes.items()}
    return Policy("TransformerActorNetwork", **options), sequences


NETWORKS = ("bc", "bc_rnn_gmm", "bc_transformer", "unet", "act", "resnet")


class Trainer:
    """A network, wrapped as by `door`, and the parts of its training step.

    Doors: plain (one process, or a program that `run` starts), ddp (torch's, with a BatchNorm that is synced by hand),
    accelerate (with BatchNorm of a rank), shares.
    """

    syncs_batchnorm = True  # with ddp and shares

    def __init__(self, door: str, name: str, net: nn.Module, tensors: list[Tensor]) -> None:
        self.name = name
        if name == "act" and not IS_WIDE:  # its places are for 2 images of 3 x 96 x 96
            net.places = nn.Parameter(0.02 * torch.randn(10, 1, 24))
        net = net.to(DEVICE)
        self.ema, data = copy.deepcopy(net), TensorDataset(*tensors)
        self.parts: Callable[..., Any] = net
        loader: Any = DataLoader(data, BATCH_SIZE, shuffle=True)
        if door in ("ddp", "accelerate"):
            size = BATCH_SIZE // dist.get_world_size()
            loader = DataLoader(data, size, sampler=DistributedSampler(data)) if door == "ddp" else loader
        if door == "ddp":
            self.net: Any = programs.with_ddp(net, self.syncs_batchnorm)
        elif door == "shares":
            ddpshim = importlib.import_module("ddpshim")  # by name: `run` would leave a program alone that imports it
            self.net = ddpshim.wrap_parallel(net, sync_batchnorm=self.syncs_batchnorm)
            loader = ddpshim.make_loader(data, batch_size=BATCH_SIZE, shuffle=True)
        else:
            self.net = net
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        if door == "accelerate":
            accelerator = importlib.import_module("accelerate").Accelerator(cpu=True, split_batches=True)
            self.net, self.optimizer, loader = accelerator.prepare(self.net, self.optimizer, loader)
        self.weights, self.batches = [*self.net.parameters()], programs.endless(loader)
        self.spent: dict[str, float] = defaultdict(float)
        self._last = 0.0

    def _mark(self, part: str) -> None:
        now = time.thread_time()
        self.spent[part] += now - self._last
        self._last = time.thread_time()

    def _forward(self, batch: list[Tensor]) -> Callable[[], Tensor]:
        """Compute the noise and the forward pass; return what computes the loss."""
        actions, net = batch[-1], self.net
        if self.name == "unet":
            noise, timestep = torch.randn_like(actions), torch.randint(0, 100, (len(actions),), device=DEVICE)
            kept = 1 - timestep[:, None, None] / 100
            noisy = kept * actions + (1 - kept) * noise
            self._mark("noise")
            predicted = net(noisy, timestep, batch[0])
            return lambda: F.mse_loss(predicted, noise)
        self._mark("noise")
        if self.name == "act":
            out, mean, log_variance = net(*batch)
            kl = lambda: (-0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp())).sum(-1).mean()  # noqa: E731
            return lambda: F.l1_loss(out, actions) + 10 * kl()
        if self.name == "bc_rnn_gmm":
            probability = net(*batch)
            return lambda: -probability.mean()
        predicted = net(batch[0])
        return lambda: F.mse_loss(predicted, actions)

    def step(self) -> float:
        self._last = time.thread_time()
        batch = [part.to(DEVICE) for part in next(self.batches)]
        self._mark("load")
        compute = self._forward(batch)
        self._mark("forward")
        loss = compute()
        self._mark("loss")
        self.optimizer.zero_grad()
        self._mark("zero")
        loss.backward()
        self._mark("backward")
        self.optimizer.step()
        self._mark("optimizer")
        with torch.no_grad():
            for average, weight in zip(self.ema.parameters(), self.weights):
                average.lerp_(weight, 0.01)
        self._mark("ema")
        found = loss.item()
        self._mark("read")
        return found


def backward_s() -> float:
    """Return the CPU seconds of the threads in which a backward pass runs on a GPU, while the main thread waits."""
    threads = [thread for thread in Path("/proc/self/task").iterdir() if "autograd" in (thread / "comm").read_text()]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def waits(step: Callable[[], Any]) -> dict[str, int]:
    """Return how often one step waits for a message, by the function that does; torch's reducer waits besides."""
    found: Counter[str] = Counter()
    original = dist.Work.wait

    def wait(*args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        found["torch" if frame is None else f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1
        return original(*args, **kwargs)

    dist.Work.wait = wait  # type: ignore[method-assign]
    try:
        step()
    finally:
        dist.Work.wait = original  # type: ignore[method-assign]
    return dict(found)


def main(door: str, names: str, num_steps: int, out: str) -> None:
    torch.set_num_threads(1)
    if IS_GPU:
        torch.cuda.set_device(0)  # ranks share it
        mapped = Path("/proc/self/maps").read_text().splitlines()
        sleep = 4  # cudaDeviceScheduleBlockingSync: waiting is no CPU time
        ctypes.CDLL(next(line.split()[-1] for line in mapped if "libcudart" in line)).cudaSetDeviceFlags(sleep)
    if door == "shares":
        importlib.import_module("ddpshim").setup(seed=0)
    elif door in ("ddp", "accelerate"):
        dist.init_process_group("nccl" if IS_GPU else "gloo")
    torch.manual_seed(0)
    made = {name: _make(name) for name in names.split(",")}  # before a training draws
    found = {}
    for name, (net, tensors) in made.items():
        trainer, loss = Trainer(door, name, net, tensors), 0.0
        for _ in range(WARM_UP):
            trainer.step()
        trainer.spent.clear()
        began, of_backward = time.perf_counter(), backward_s()
        for _ in range(num_steps):
            loss = trainer.step()
        trainer.spent["backward"] += backward_s() - of_backward
        ms = {part: 1000 * trainer.spent[part] / num_steps for part in PARTS}
        found[name] = {
            "ms": ms,
            "wall_ms": 1000 * (time.perf_counter() - began) / num_steps,
            "loss": loss,
            "waits": waits(trainer.step),
        }
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
