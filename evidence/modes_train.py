"""Trains small networks in one process, in the modes that its words name: `python modes_train.py net=lstm clip=norm`.

It is plain torch, and knows nothing of ranks. What a trainer that calls ddpshim does otherwise is a method of `Door`
(evidence/modes_doors.py). evidence/modes.py lists the words; one that is not given is the first of its list.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import data
from torch.utils.checkpoint import checkpoint

NUM_SAMPLES, NUM_EPOCHS, STOP_AT = 38, 3, 3  # the last batch has two or three rows
FIRST = {"batch": "12", "workers": "0", "sampler": "shuffle", "optimizer": "sgd", "precision": "float64"}


GENERATOR = np.random.default_rng(7)


class Samples(data.Dataset):
    """Sequences, their targets and valid steps; `draws` names what adds noise to a sample, or what it remembers."""

    def __init__(self, size: int, draws: str) -> None:
        self.num_visits = 0
        made, self.draws, dtype = np.random.default_rng(size), draws, torch.get_default_dtype()
        self.x = torch.tensor(made.standard_normal((size, 4, 5)), dtype=dtype)
        self.y = torch.tensor(made.standard_normal((size, 2)), dtype=dtype)
        self.valid = (torch.arange(4) <= torch.tensor(made.integers(0, 4, size))[:, None]).to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        self.num_visits += 1
        kinds = {"no": lambda: 0.0, "numpy": np.random.uniform, "python": random.random, "own": GENERATOR.uniform}
        kinds["visits"] = lambda: self.num_visits % 7
        return self.x[i] + 0.1 * kinds.get(self.draws, lambda: torch.rand(4, 5))(), self.y[i], self.valid[i]


class Stream(Samples, data.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        return (self[i] for i in range(info.id if info else 0, len(self), info.num_workers if info else 1))


class Batches:
    """A batch sampler of the program's own."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.size, self.batch_size = size, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size).tolist()
        for i in range(0, self.size, self.batch_size):
            yield order[i : i + self.batch_size]

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)


def as_mapping(samples: Any) -> Any:
    return dict(zip(("x", "y", "valid"), data.default_collate(samples)))


def with_noise(samples: Any) -> Any:
    x, y, valid = data.default_collate(samples)
    return x + 0.1 * torch.randn_like(x), y, valid


def make_loader(words: Words, door: Door) -> Any:
    kind, size = words["sampler"], int(words["batch"])
    samples = (Stream if kind == "stream" else Samples)(NUM_SAMPLES, words["draws"])
    how: dict[str, Any] = {"batch_size": size, "drop_last": words["drop_last"] == "yes"}
    if kind == "batches":
        how = {"batch_sampler": Batches(len(samples), size)}
    elif kind == "weighted":
        how["sampler"] = data.WeightedRandomSampler(torch.arange(1.0, len(samples) + 1), len(samples))
    elif kind == "subset":
        how["sampler"] = data.SubsetRandomSampler(range(len(samples) - 5))
    elif kind in ("shuffle", "generator"):
        how["shuffle"] = True
        how["generator"] = torch.Generator().manual_seed(3) if kind == "generator" else None
    if words["workers"] != "0":
        how |= {"num_workers": 2, "persistent_workers": words["workers"] == "persistent"}
    return door.loader(samples, collate_fn={"mapping": as_mapping, "noise": with_noise}.get(words["collate"]), **how)


class Net(nn.Module):
    def __init__(self, kind: str, num_in: int = 5, num_out: int = 2, recompute: str = "no") -> None:
        super().__init__()
        self.recompute, self.kind = recompute, kind
        self.embed, self.head = nn.Linear(num_in, 16), nn.Linear(16, num_out)
        if kind == "batchnorm":
            self.body: Any = nn.Sequential(nn.Conv1d(16, 16, 3, padding=1, bias=False), nn.BatchNorm1d(16), nn.ReLU())
        elif kind == "lstm":
            self.body = nn.LSTM(16, 16, num_layers=2, dropout=0.1, batch_first=True)
        elif kind == "transformer":
            self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        else:
            self.body = nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh())

    def middle(self, h: Tensor) -> Tensor:
        if self.kind == "batchnorm":
            return self.body(h.transpose(1, 2)).transpose(1, 2)
        return self.body(h)[0] if self.kind == "lstm" else self.body(h)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.recompute != "no" and self.training:
            return self.head(checkpoint(self.middle, h, use_reentrant=self.recompute == "reentrant"))
        return self.head(self.middle(h))


class Copy(nn.Module):
    """An average of weights as a copy of the network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(net).requires_grad_(False)

    @torch.no_grad()
    def update_parameters(self, net: nn.Module) -> None:
        for mine, p in zip(self.module.parameters(), net.parameters()):
            mine.lerp_(p, 0.1)


class Shadow(dict):
    """An average of weights as a mapping of tensors, which belongs to no module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__((name, p.detach().clone()) for name, p in net.named_parameters())
        self.state_dict, self.load_state_dict = self.copy, self.update

    def update_parameters(self, net: nn.Module) -> None:
        for name, p in net.named_parameters():
            self[name].mul_(0.9).add_(p.detach(), alpha=0.1)


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {"copy": Copy, "shadow": Shadow, "swa": AveragedModel}
AVERAGES["averaged"] = lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def make_optimizer(kind: str, net: nn.Module) -> optim.Optimizer:
    """Return an optimizer. `eps`: a gradient that is zero but for its rounding must not become a step."""
    parameters, kinds = [*net.parameters()], {"adamw": optim.AdamW, "rmsprop": optim.RMSprop, "adagrad": optim.Adagrad}
    if kind == "groups":
        groups = [{"params": parameters[:2], "lr": 1e-3}, {"params": parameters[2:], "weight_decay": 0.1}]
        return optim.Adam(groups, 1e-2, eps=1e-4)
    if kind == "lbfgs":
        return optim.LBFGS(parameters, lr=0.1, max_iter=3)
    return kinds[kind](parameters, 1e-2, eps=1e-4) if kind in kinds else optim.SGD(parameters, 1e-2, momentum=0.9)


class Words(dict):
    def __missing__(self, name: str) -> str:
        return FIRST.get(name, "no")


class Door:
    """Where a trainer that calls ddpshim differs from this one, which does not."""

    training: Any = None  # a Resumable

    def loader(self, *args: Any, **options: Any) -> Any:
        return data.DataLoader(*args, **options)  # what now has this name

    def start(self, words: Words) -> None:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)

    def wrap(self, net: nn.Module) -> Any:
        return net

    def resume(self, objects: Any, values: Any) -> Any:
        return values

    def interrupt(self, is_now: bool) -> None: ...

    def end(self) -> None: ...


class Trainer:
    def __init__(self, door: Door, words: Words) -> None:
        self.door, self.words = door, words
        is_half = words["precision"] == "bf16"
        torch.set_default_dtype(torch.float64 if words["precision"] == "float64" else torch.float32)
        door.start(words)
        self.bare = Net(words["net"], recompute=words["recompute"])
        critics = [Net("critic", 7, 1)] if words["net"] == "two" else []
        if words["nudge"] == "yes":  # how far does rounding take this training?
            drawn = torch.Generator().manual_seed(0)
            for p in nn.ModuleList([self.bare, *critics]).parameters():
                eps = torch.finfo(torch.bfloat16 if is_half else p.dtype).eps
                p.data *= 1 + eps * torch.randint(-1, 2, p.shape, generator=drawn)
        self.ema = AVERAGES[words["ema"]](self.bare) if words["ema"] != "no" else None
        self.targets = [Copy(each) for each in critics]
        self.net, *self.critics = self.nets = [door.wrap(each) for each in (self.bare, *critics)]
        self.optimizers = [make_optimizer(words["optimizer"], self.net)]
        self.optimizers += [optim.Adam(each.parameters(), 1e-2, eps=1e-4) for each in self.critics]
        self.schedule: Any = None
        if words["schedule"] == "cosine":
            self.schedule = optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], 6)
        elif words["schedule"] == "plateau":
            self.schedule = optim.lr_scheduler.ReduceLROnPlateau(self.optimizers[0], patience=0, threshold=1.0)
        self.loader = make_loader(words, door)
        if words["evaluate"] == "loader":
            self.valid_loader = door.loader(Samples(10, "no"), 4, drop_last=False)
        kinds = {"net": self.nets, "optimizer": self.optimizers, "target": self.targets}
        self.objects = {f"{kind}{i}": each for kind, several in kinds.items() for i, each in enumerate(several)}
        once = {"ema": self.ema, "schedule": self.schedule}
        self.objects |= {name: each for name, each in once.items() if each is not None}
        self.values: dict[str, Any] = {"log": [], "losses": [], "best": float("inf"), "num": 0}
        self.out, self.first = Path("out"), 0
        self.out.mkdir(exist_ok=True)
        self.resume()
        if words["logging"] == "file":
            logging.basicConfig(filename=self.out / "train.log", level=logging.INFO, format="%(message)s")

    def resume(self) -> None:
        if self.words["resume"].startswith("signal"):
            self.values = self.door.resume(self.objects, self.values)
            self.first = self.door.training.epoch if self.door.training else 0
        elif self.words["start"] == "second":
            saved = torch.load(self.out / "progress.pth", weights_only=False)
            for name, each in self.objects.items():
                each.load_state_dict(saved["objects"][name])
            self.values, self.first = saved["values"], 1
            torch.set_rng_state(saved["torch"]), np.random.set_state(saved["numpy"])

    def log(self, value: Any) -> None:
        self.values["log"].append(float(value))
        if self.words["logging"] == "print":
            print(f"log {value:.6e}", flush=True)
        elif self.words["logging"] == "file":
            logging.info("%.6e", value)
        elif self.words["logging"] == "append":
            with open(self.out / "log.csv", "a") as file:
                file.write(f"{value:.6e}\n")

    def loss(self, batch: Any) -> Tensor:
        x, y, valid = batch
        if self.words["noise"] == "torch":
            x = x + 0.1 * torch.randn_like(x)
        elif self.words["noise"] == "numpy":
            x = x + torch.as_tensor(0.1 * np.random.randn(*x.shape), dtype=x.dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.words["precision"] == "bf16"):
            out = self.net(x)
            apart = (out - y[:, None]).square().mean(-1)
            if self.words["loss"] == "masked":
                loss = (apart * valid).sum() / valid.sum()
            elif self.words["loss"] == "contrastive":
                loss = F.cross_entropy(out.mean(1) @ y.to(out.dtype).T, torch.arange(len(y)))
            else:
                loss = apart.mean()
            for critic in self.critics:
                loss = loss - 0.1 * critic(torch.cat([x, out], -1)).mean()
        return loss

    def train_critics(self, x: Tensor, y: Tensor, valid: Tensor) -> None:
        for critic, target, optimizer in zip(self.critics, self.targets, self.optimizers[1:]):
            with torch.no_grad():
                wanted = 0.9 * target.module(torch.cat([x, self.net(x)], -1)) + valid[..., None]
            optimizer.zero_grad()
            F.mse_loss(critic(torch.cat([x, y[:, None].expand(-1, 4, -1)], -1)), wanted).backward()
            optimizer.step()
            target.update_parameters(critic)

    def step(self, batch: list[Tensor]) -> Tensor:
        self.values["num"] += 1
        optimizer, parameters = self.optimizers[0], self.net.parameters()
        self.train_critics(*batch)
        if self.words["optimizer"] == "lbfgs":

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                loss.backward()
                return loss

            return optimizer.step(closure)
        is_divided = self.words["accumulate"] == "parts"
        for part in zip(*(tensor.chunk(2) for tensor in batch)) if is_divided else [batch]:
            loss = self.loss(part)
            (loss / (1 + is_divided)).backward()
        if self.words["accumulate"] != "batches" or self.values["num"] % 2 == 0:
            if self.words["clip"] == "norm":
                self.log(nn.utils.clip_grad_norm_(parameters, 0.1))
            elif self.words["clip"] == "value":
                nn.utils.clip_grad_value_(parameters, 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def evaluate(self, score: float) -> float:
        """Return what decides which weights are best; `score` is that of training."""
        self.net.eval()
        if self.words["evaluate"] == "loader":
            apart, hits = [], []
            for x, y, _ in self.valid_loader:
                out = self.net(x)
                apart.append((out - y[:, None]).square().mean((1, 2)))
                hits.append((out.mean(1) * y).sum(1) > 0)
            score = float(torch.cat(apart).mean())
            self.log(score), self.log(float(torch.cat(hits).double().mean()))
        elif self.words["evaluate"] == "rollout":
            state = torch.ones(1, 4, 5)
            for _ in range(3):
                state = state + F.pad(self.bare(state), (0, 3)) * 0.1
            self.log(state.norm())
        self.net.train()
        return score

    def save(self, epoch: int, score: float) -> None:
        if self.words["save"] == "epochs":
            torch.save({"net": self.bare.state_dict(), "epoch": epoch}, self.out / f"epoch_{epoch}.pth")
        elif self.words["save"] == "best" and score < self.values["best"]:
            self.values["best"] = score
            torch.save({"net": self.net.state_dict(), "score": score}, self.out / "best.pth")

    def train(self) -> None:
        words, resumable = self.words, self.door.training
        for epoch in range(self.first, NUM_EPOCHS):
            losses = self.values["losses"]
            for batch in resumable.steps(self.loader, epoch) if resumable else self.loader:
                losses.append(self.step([*(batch.values() if isinstance(batch, dict) else batch)]).detach())
                if self.ema is not None:
                    self.ema.update_parameters(self.bare)
                if words["schedule"] == "cosine":
                    self.schedule.step()
                if words["logging"] != "epoch":
                    self.log(losses[-1].item())
                if words["resume"].startswith("signal") and words["start"] == "first":
                    self.door.interrupt(self.values["num"] == STOP_AT)
            score = self.evaluate(torch.stack(losses).mean().item())
            self.values["losses"] = []
            self.log(score)
            if words["schedule"] == "plateau":
                self.schedule.step(score)
            self.save(epoch, score)
            if words["resume"].startswith("flag") and words["start"] == "first":
                states = {name: each.state_dict() for name, each in self.objects.items()}
                streams = {"torch": torch.get_rng_state(), "numpy": np.random.get_state()}
                return torch.save({"objects": states, "values": self.values, **streams}, self.out / "progress.pth")
        if resumable:
            resumable.finish()
        if words["save"] == "best":
            self.net.load_state_dict(torch.load(self.out / "best.pth")["net"])
        streams = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])
        result = {"log": torch.tensor(self.values["log"], dtype=torch.float64), "streams": streams}
        for kind, each in self.objects.items():
            state = each.state_dict()
            for name, of in state["state"].items() if "optimizer" in kind else [("", state)]:
                result |= {f"{kind}.{name}.{key}": value for key, value in of.items() if isinstance(value, Tensor)}
        torch.save(result, Path("result.pth"))


def main(door: Door, words: list[str]) -> None:
    Trainer(door, Words(word.split("=") for word in words)).train()
    door.end()


if __name__ == "__main__":
    main(Door(), sys.argv[1:])
