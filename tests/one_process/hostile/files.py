"""What comes in and goes out: loaders, containers, numpy, files, Python's own functions."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import pickle
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.one_process.hostile.parts import Net, fit, program, sequences, trains
from tests.one_process.parts import data, loader, mlp, train
from tests.one_process.runner import Log, Trained


@program
def copied_and_pickled(log: Log) -> Trained:
    net, kept = mlp(), []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        kept.append(copy.deepcopy(x))
        kept.append(pickle.loads(pickle.dumps(out.detach())))
        torch.save({"x": x, "out": out.detach()}, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        twin = pickle.loads(pickle.dumps(net))
        log(loaded["x"].shape[0], loaded["x"].sum(), twin(loaded["x"]).mean(), kept[-1].mean(0), copy.copy(x)[0])
        log(x.__reduce_ex__(2)[0].__name__, len(pickle.dumps(x.clone())) > 24 * len(x))
        return F.mse_loss(out, y) + 0.1 * F.mse_loss(copy.deepcopy(net)(loaded["x"]), loaded["out"])

    return train(log, net, loss_of) + kept


@program
def packed_by_a_collate_function(log: Log) -> Trained:
    x, y, lengths = sequences()
    items = [(x[i, : lengths[i]], y[i, 0]) for i in range(50)]

    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Any, Tensor, Tensor]:
        items = sorted(items, key=lambda item: -len(item[0]))
        rows = [item[0] for item in items]
        return rnn.pack_sequence(rows), rnn.pad_sequence(rows), torch.stack([item[1] for item in items])

    def forward(net: Net, packed: Any, padded: Tensor) -> Tensor:
        _, last = net.gru(packed)
        other, _ = net.gru(padded)
        return net.head(last[0] + other.mean(0))

    net = Net(forward, gru=nn.GRU(3, 6), head=nn.Linear(6, 1))
    return fit(log, net, DataLoader(items, 16, shuffle=True, collate_fn=collate))


@trains()
def numpy_in_the_middle(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)
    array = out.detach().numpy()
    ranks = np.argsort(np.argsort(array[:, 0]))
    weights = torch.from_numpy(np.exp(-ranks / len(ranks))).to(x.dtype)[:, None]
    more = np.concatenate([x, y], 1).mean(0)
    log(np.mean(x.numpy(), 0), np.asarray(x).shape, np.array(y).sum(), x.__array__().std(), more)
    log(np.corrcoef(array[:, 0], y[:, 0]), np.maximum(x, 0).sum(), np.percentile(y, 50), np.stack([x, x]).shape)
    log(np.dot(y[:, 0], y[:, 0]), np.ones(6) @ x[0].numpy())
    return (weights * (out - y).square()).mean() + (torch.as_tensor(array) * out).mean()


@trains()
def python_builtins(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)
    total, largest, least = sum(out), max(out), min(out)
    ordered = sorted(y[:, 0], reverse=True)
    log(total, largest, least, ordered[0], any(y > 1), all(y[:, 0] < 2), abs(y[0]), round(float(y[0]), 3))
    log(f"{out.mean():.3f} {y[0].item():.2e} {len(x)}", "%.3f" % y.mean(), repr(y[0])[:6])  # noqa: UP031
    log(int(out.sum() * 10), math.sqrt(x.square().mean()), pow(x[0, 1], 2), list(map(float, y))[:2])
    log([tuple(r.shape) for r in out][:1], list(range(int(y.argmax()))), [0, 1, 2][(y[0] > 0).long()])
    log(y[0, 0] in y, Counter((y[:, 0] > 0).tolist()).most_common())
    loss = (total / len(x)).square().mean() + F.mse_loss(out, y)
    return loss + (largest - least).sum() * 0.1 + math.exp(-y.std()) * out.std()


@dataclasses.dataclass
class Sample:
    x: Tensor
    names: list[str]
    y: Optional[Tensor] = None

    def to(self, dtype: torch.dtype) -> Sample:
        return dataclasses.replace(self, x=self.x.to(dtype))


class Result(NamedTuple):
    out: Tensor
    hidden: tuple[Tensor, ...]
    loss: Optional[Tensor] = None


class Lazy:
    """A container that torch does not know."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.make(), self.make() * 2])


@program
def containers_of_the_program(log: Log) -> Trained:
    def forward(net: Net, sample: Sample, *, extra: Optional[dict[str, Any]] = None) -> Result:
        h = net.body(sample.x)
        shift, double = extra["lazy"]
        h = h + shift + double.mean(0) + sum(extra["more"][1]) + extra["deque"][-1]
        extra["written"] = h.detach()
        loss = None if sample.y is None else F.mse_loss(net.head(h), sample.y)
        return Result(out=net.head(h), hidden=(h, sample.x), loss=loss)

    net = Net(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 1))
    rows = [(x, f"sample {i}", y) for i, (x, y) in enumerate(zip(*data()))]

    def collate(items: list[Any]) -> Sample:
        xs, names, ys = zip(*items)
        return Sample(torch.stack(xs), list(names), torch.stack(ys))

    optimizer = SGD(net.parameters(), 0.1)
    for sample in DataLoader(rows, 16, shuffle=True, collate_fn=collate):
        x = sample.x
        extra = {"lazy": Lazy(lambda x=x: x * 0.1), "more": [1, (x, x.flip(0))], "deque": deque([x[:1], x], maxlen=1)}
        result = net(sample.to(x.dtype), extra=extra)
        optimizer.zero_grad()
        (result.loss + result.hidden[0].square().mean()).backward()
        optimizer.step()
        assert len(sample.names) == len(x) == len(result.out)
        log(result.loss, extra["written"].mean(0), sample.names[:2])
        log(result._replace(loss=0).out.mean(), dataclasses.astuple(sample)[0].sum())
    return [net]


@program
def networks_called_in_unusual_ways(log: Log) -> Trained:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.memory = nn.Linear(6, 4), nn.Linear(4, 1), None
            self.seen: list[Tensor] = []

        def encode(self, x: Tensor) -> Tensor:
            self.memory = self.encoder(x).tanh()
            self.seen.append(self.memory.detach().mean(0))
            return self.memory

        def sample(self, n: int) -> Tensor:
            return self.decoder(torch.randn(n, 4))

        def loss(self, y: Tensor) -> Tensor:
            return F.mse_loss(self.decoder(self.memory), y)

        def forward(self, *, batch: dict[str, Tensor], weights: Optional[Tensor] = None) -> dict[str, Tensor]:
            out = self.decoder(self.encode(batch["x"]))
            return {"out": out, "weights": torch.ones(len(out)) if weights is None else weights}

    net = Unusual()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        net.encode(x)
        loss = net.loss(y) + net.sample(len(x)).mean() + net.sample(5).square().mean()
        out = net(batch={"x": x})
        by_hand = net.decoder(net.encoder(x - x.mean(0)))
        log(net.memory[0], Unusual.encode(net, x).sum(), nn.Module.__call__(net.decoder, net.memory).mean())
        loss = loss + ((out["out"] - y).square()[:, 0] * out["weights"]).mean()
        return loss + by_hand.var() + net.forward(batch={"x": x})["out"].mean()

    return train(log, net, loss_of) + net.seen


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(23):
            x = torch.randn(6) + i / 23
            yield x, x[:1].sin()


@program
def loader_of_a_stream(log: Log) -> Trained:
    net = mlp()
    fit(log, net, DataLoader(Stream(), 7))
    fit(log, net, DataLoader(Stream(), 7, drop_last=True))
    return fit(log, net, ((x[None], y[None]) for x, y in DataLoader(Stream(), batch_size=None)))


class Batched(Dataset):
    """Makes whole batches itself."""

    def __init__(self) -> None:
        self.x, self.y = data()

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i >= 5:
            raise IndexError
        return self.x[i * 10 : i * 10 + 10], self.y[i * 10 : i * 10 + 10]


@program
def loader_without_batches(log: Log) -> Trained:
    net = mlp()
    fit(log, net, DataLoader(Batched(), batch_size=None, shuffle=True))
    fit(log, net, Batched())
    fit(log, net, ((x[0], y[0]) for x, y in DataLoader(Batched())))
    x, y = data()
    rows = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(range(50)), 16, False)
    return fit(log, net, DataLoader(TensorDataset(x, y), sampler=rows, batch_size=None))


@program
def loaders_side_by_side(log: Log) -> Trained:
    net, endless = mlp(), iter(loader(*data(), size=7))

    def again() -> Any:
        nonlocal endless
        try:
            return next(endless)
        except StopIteration:
            endless = iter(loader(*data(), size=7))
            return next(endless)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a, b = again()
        k = min(len(a), len(x))
        mixed = torch.cat([x, a])
        log(len(mixed), a[0], net(mixed).mean())
        return F.mse_loss(net(mixed), torch.cat([y, b])) + (x[:k] - a[:k]).square().mean() * net(x[:k]).mean()

    first = next(iter(loader(*data())))
    for i, (pair, other) in enumerate(zip(loader(*data()), loader(*data(), size=10))):
        if i == 2:
            break
        train(log, net, loss_of, [pair, other, first])
    return [net]


@trains()
def constructed_from_rows(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    means = torch.tensor([x.mean(), y.mean().item(), float(y[0])])
    rows = torch.tensor(np.array([r.numpy() for r in x]), dtype=x.dtype) + torch.tensor(x.tolist())
    rows = rows + torch.as_tensor(x) + torch.asarray(x) + torch.stack([*x])
    rows = rows + x.new_tensor(y.tolist()) + x.new_full(x.shape, 0.1) + x.new_zeros(len(x), 1)
    x.label = "kept"
    log(means, x.label, hasattr(x * 1, "label"), torch.DoubleTensor(y.tolist()).mean())
    wide = torch.hstack([x, y]) + torch.column_stack([x, y[:, 0]]) + torch.vstack([x, x])[: len(x)].mean()
    wide = wide.mean() + torch.dstack([x, x]).mean() + torch.concat((x, x), 0).mean()
    corner = torch.block_diag(x, y)[: len(x), :6] + torch.kron(x[:1], y)[:, :6]
    corner = corner + torch.meshgrid(y[:, 0], y[:2, 0], indexing="ij")[0][:, :1]
    return F.mse_loss(net(rows * 0.2 + corner), y) + wide.square()


@program
def forward_that_yields(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Iterator[Tensor]:
        for layer in net.layers:
            x = layer(x - x.mean(0)).tanh()
            yield x

    net = Net(forward, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(3)))
    return train(log, net, lambda x, y: sum(F.mse_loss(h[:, :1], y) + (h * torch.rand_like(h)).mean() for h in net(x)))
