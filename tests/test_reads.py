"""What a program reads out of tensors on two ranks, compared with one process."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import linecache
import logging
import math
import pickle
import re
import statistics
import struct
import sys
import threading
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from ddpshim.trainers.unedited.products import Sources
from ddpshim.trainers.unedited.tallies import Count, FloatCount, Mean, Rows, Total
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import ddpshim
from ddpshim.errors import WorldError
from ddpshim.job import shares
from ddpshim.job.world import World
from ddpshim.trainers.unedited import losses
from ddpshim.trainers.unedited.reads import _mean, equal_reads
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
_OWN = (0.125, 0.625)  # of the two ranks
_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    ".item()": lambda loss: loss.item(),
    "of one element": lambda loss: loss.view(1, 1).item(),
    "float": lambda loss: float(loss.detach()),
    "int": lambda loss: int(loss.detach() * 8),
    "f-string": lambda loss: f"{loss:.3f}",
    "str": str,
    "format": "{:.3f}".format,
    "round": lambda loss: round(loss.item(), 3),
    "tolist": lambda loss: loss.tolist(),
    "numpy": lambda loss: loss.detach().numpy().item(),
    "asarray": lambda loss: np.asarray(loss.detach()).tolist(),
    "mean of numpy's": lambda loss: float(np.mean([loss.detach(), loss.detach()])),
    "statistics": lambda loss: statistics.fmean([loss.detach(), loss.detach()]),
    "isnan": lambda loss: math.isnan(loss.detach()),
    "bool": lambda loss: bool(loss - loss),
    "min": lambda loss: min(loss.item(), 0.3),
}


def _in_the_name_of(package: str, loss: torch.Tensor) -> float:
    """What a line of that package reads."""
    names: dict[str, Any] = {"__name__": package, "loss": loss}
    exec("read = loss.item()", names)
    return float(names["read"])


class _Own(torch.Tensor):
    pass


class _Peeks(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.argmax().item(), bool(x[0] > 0.3), x[0].item()


def _sums(own: float) -> list[float]:
    """What is read of a sum over the samples of a batch, and of its parts, before its backward pass and after it."""
    x, weights = torch.full((2, 3), own, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    parts = (2 * x).sum(), functional.mse_loss(x, torch.zeros(2, 3), reduction="sum")
    loss = parts[0] + parts[1]
    read = [loss.item(), parts[1].item(), (parts[0] / 2).item(), (loss / 2 / 4).item()]
    with losses.of_the_batch([loss]):
        loss.backward()
    read += [loss.item(), loss.detach().item(), parts[1].item(), float(f"{loss.detach():.6f}")]
    return [*read, (2 * weights).sum().item(), x.mean().item()]


def _counted(rank: int) -> list[float]:
    """What is read of a loss of terms that count differently, and of these, before its backward pass and after it."""
    x, mask = torch.tensor([_OWN[rank], 3 * _OWN[rank]], requires_grad=True), torch.tensor([[1, 1], [1, 0]])[rank]
    parts = (x * mask).sum() / mask.sum(), x.mean(), functional.mse_loss(x, torch.zeros(2), reduction="sum")
    halved, loss = (x * mask).mean() / mask.float().mean() / 2, parts[0] * 2 + parts[1] - parts[2]
    nothing = (x * (1 - rank)).sum() / torch.tensor([2, 0])[rank]  # all rows of rank 1 are padding
    read = [number.item() for number in (*parts, halved, loss, nothing, nothing + parts[1])]
    with losses.of_the_batch([loss]):
        loss.backward()
    return [*read, *(part.item() for part in (*parts, halved, loss)), loss.detach().item()]


def _after_its_batch(rank: int) -> list[float]:
    """What is read, after a pass, of losses of its last batch, of which the ranks have 2 rows and 1."""
    own, batches = torch.full(((2, 1)[rank],), _OWN[rank], requires_grad=True), _Peeks()
    shares.begin_batch(len(own), of=batches, total=3)
    mean, total = own.mean(), (2 * own).sum()
    both = mean + functional.mse_loss(own, torch.zeros(len(own)))
    with losses.of_the_batch([total, both]):
        (total + both).backward()
    shares.end_batch(batches)
    shares.keep(is_left=False)
    return [both.item(), both.detach().item(), mean.item(), total.item(), mean.detach().clone().item()]


def _reads() -> dict[str, Any]:
    here, is_alone = ddpshim.world(), []
    loss = torch.tensor(_OWN[here.rank], requires_grad=True) * 1
    before = {name: vars(torch.Tensor).get(name) for name in ("item", "__float__", "__repr__", "numpy", "__bool__")}
    said = io.StringIO()
    with contextlib.redirect_stderr(said), equal_reads(here, lambda: bool(is_alone)):
        out = {name: read(loss) for name, read in _READS.items()}
        out["parameter"] = nn.Parameter(torch.tensor([_OWN[here.rank]])).item()
        out["of a class of its own"] = torch.tensor(_OWN[here.rank]).as_subclass(_Own).item()
        out["equal"] = torch.tensor(0.1).item(), torch.tensor([1e-45]).item(), bool(torch.tensor(True))
        nan = torch.tensor(struct.unpack("<i", struct.pack("<i", 0x7FC00001))[0], dtype=torch.int32).view(torch.float32)
        out["nan"] = nan.item(), (loss * (math.nan if here.rank else 1)).item(), (loss.log() * math.inf).item()
        out["count"] = [int((torch.arange(4) < 1 + here.rank).sum()) for _ in range(2)]
        out["yes"] = bool(loss < 0.3)
        out["in a network"] = _Peeks()(torch.tensor([_OWN[here.rank], 0.2, here.rank]))
        records = []
        log = logging.Logger("log")
        log.addHandler(logging.Handler())
        log.handlers[0].emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        log.warning("loss %.3f", loss)
        out["logged"] = records
        shares.begin_batch((3, 1)[here.rank])
        out["by rows"] = loss.item(), loss.double().item()
        shares.end_batch()
        shares.begin_batch(2)
        x = torch.zeros(2, 3)
        out["counted rows"] = 0
        for y in (x, x[:, :1] + here.rank):
            out["counted rows"] += (y >= 0).sum().item()
        out["by its rows"] = float(loss) * len(x)
        out["sums"], out["counted"] = _sums(_OWN[here.rank]), _counted(here.rank)
        shares.end_batch()
        plateau = ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), patience=0)
        plateau.step(loss)
        out["plateau"] = plateau.best
        is_alone.append(1)
        out["alone"] = loss.item()
        is_alone.clear()
        out["thread"] = []
        thread = threading.Thread(target=lambda: out["thread"].append(loss.item()))
        thread.start()
        thread.join()
        packages = "torch.optim.adam", "tqdm.std", "ddpshim.model"
        out["of others"] = [_in_the_name_of(package, loss) for package in packages]
        out["of the program's"] = [_in_the_name_of(package, loss) for package in ("__main__", "policies.act")]
        out["after its batch"] = _after_its_batch(here.rank)
        out["large"] = (torch.arange(3) + here.rank).tolist()
    out["after"] = loss.item()
    assert {name: vars(torch.Tensor).get(name) for name in before} == before
    out["said"] = said.getvalue()
    return out


def test_numbers_are_those_of_all_ranks() -> None:
    of_ranks, said_by_it = run_ranks(_reads, 2), []
    mean = torch.tensor(sum(_OWN) / 2, requires_grad=True) * 1
    for own, out in zip(_OWN, of_ranks):
        assert [out.pop(name) for name in ("alone", "after", "thread")] == [own, own, [own]]
        assert out.pop("of others") == [own] * 3
        assert (out.pop("parameter"), out.pop("of a class of its own")) == (0.375, own)
        assert out.pop("of the program's") == [0.375] * 2
        assert out.pop("in a network") == ((1, False, 0.375) if own == _OWN[0] else (2, True, 0.375))
        assert out.pop("large") == ([0, 1, 2] if own == _OWN[0] else [1, 2, 3])
        for name, read in _READS.items():
            assert out.pop(name) == read(mean), name
        assert out.pop("equal") == (torch.tensor(0.1).item(), torch.tensor(1e-45).item(), True)
        assert list(map(math.isnan, out["nan"][:2])) == [True, True]
        assert out.pop("nan")[2] == -math.inf
        assert (out.pop("count"), out.pop("yes"), out.pop("logged")) == ([1, 1], True, ["loss 0.375"])
        assert out.pop("by rows") == (0.25, 0.25)
        assert out.pop("counted rows") == 6 + 2 * 2  # the same on both ranks, and rows of each
        assert out.pop("by its rows") == 0.75
        assert out.pop("plateau") == 0.375
        in_all, squares = 12 * sum(_OWN), 6 * sum(own**2 for own in _OWN)
        whole = in_all + squares
        sums = [whole, squares, in_all / 4, whole / 16, whole, whole, squares, whole, 16.0, 0.375]
        assert out.pop("sums") == pytest.approx(sums, rel=1e-6)
        counted = [0.375, 0.75, 4.0625, 0.1875, 1.625 - 4.0625 / 2]  # of the last one the mean over the ranks
        of_one_rank = [0.25, 0.5]
        assert out.pop("counted") == pytest.approx([*counted, *of_one_rank, *counted, counted[-1]], rel=1e-6)
        means = [(2 * _OWN[0] ** power + _OWN[1] ** power) / 3 for power in (1, 2)]
        assert out.pop("after its batch") == pytest.approx([sum(means), sum(means), means[0], 6 * means[0], 0.375])
        said_by_it.append(out.pop("said"))
        assert not out
    assert said_by_it[1] == ""
    assert said_by_it[0].count("reads a loss whose terms are averaged over ranks in different ways") == 2
    assert len(re.findall(r":\d+: in `float\(loss\) \* len\(x\)`.* 2 times too small", said_by_it[0])) == 1
    said = [line for line in said_by_it[0].splitlines() if "differs between ranks" in line]
    assert len(said) == 3
    assert "after the pass over a loader that has a batch (3 samples) which the ranks do not divide" in said.pop()
    assert re.search(r"test_reads\.py:\d+ reads a whole number that differs between ranks \(1, 2\)", said[0])
    assert re.search(r"test_reads\.py:\d+ reads a yes or no that differs between ranks \(True, False\)", said[1])


def _part(kind: str) -> None:
    here = ddpshim.world()
    if kind == "another line":
        if here.is_main:
            torch.zeros(()).item()
        else:
            torch.zeros(()).item()
    elif kind == "one step further":
        for (x,) in ddpshim.make_loader(TensorDataset(torch.zeros(8)), 4):
            if here.is_main or shares.positions()[0][0].step == 1:
                x.sum().item()
    elif here.is_main:
        here.gather(1)
    else:
        torch.zeros(()).item()


def _error_of(kind: str) -> str:
    with equal_reads(ddpshim.world(), lambda: False), pytest.raises(WorldError) as raised:
        _part(kind)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["another line", "one step further", "a collective"])
def test_ranks_that_read_at_different_lines_stop(kind: str) -> None:
    for text in run_ranks(_error_of, 2, kind):
        lines = re.findall(r"test_reads\.py:(\d+)", text)
        assert len(lines) == 2, text
        assert (lines[0] == lines[1]) is (kind == "one step further")
        if kind == "one step further":
            assert re.search(r"rank 0 reads .* in step 0 of epoch 0 .*; rank 1 reads .* in step 1 of epoch 0", text)


def _train(make: Callable[..., Any], wrap: Callable[[nn.Module], nn.Module]) -> Any:
    """A trainer that stops early, by the loss of its batches."""
    torch.manual_seed(0)
    net = wrap(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)))
    x = (torch.arange(144.0) * 0.7).sin().view(48, 3)
    loader = make(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    logs: list[tuple[float, float]] = []
    for _ in range(20):
        for x, y in loader:
            loss = functional.mse_loss(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            logs.append((loss.item(), float(norm)))
            if loss < 0.2:
                return torch.tensor(logs)
    return torch.tensor(logs)


def _train_on_ranks() -> Any:
    with equal_reads(ddpshim.world(), lambda: False):
        return _train(ddpshim.make_loader, ddpshim.wrap_parallel)


def test_a_training_logs_and_decides_as_one_process() -> None:
    one = _train(DataLoader, lambda net: net)
    assert 6 < len(one) < 120
    for logs in run_ranks(_train_on_ranks, 2):
        assert logs.shape == one.shape
        torch.testing.assert_close(logs, one, rtol=2e-6, atol=1e-7)


class _Meter:
    """The meter of many trainers."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.count += n


def _tutorial(make: Callable[..., Any], wrap: Callable[[nn.Module], nn.Module], num_samples: int) -> Any:
    """The loop of torch's tutorials; returns what it prints."""
    torch.manual_seed(0)
    net = wrap(nn.Linear(3, 2).double())
    x = (torch.arange(3.0 * num_samples) * 0.7).sin().double().view(num_samples, 3)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader, optimizer = make(data, 8, shuffle=True, drop_last=False), torch.optim.SGD(net.parameters(), lr=0.5)
    printed: list[float] = []
    for _ in range(3):
        running, correct, hits, right, seen, parts, meter = 0.0, 0, 0, 0.0, 0, list[float](), _Meter()
        for a, b in loader:
            out = net(a)
            loss = functional.cross_entropy(out, b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item() * a.size(0)
            n = len(a)
            now = 2 * loss.item()
            parts.append(n * now)
            meter.update(loss.item(), a.shape[0])
            correct += (out.argmax(1) == b).sum().item()
            right = right + torch.sum(out.argmax(1).eq(b).double()).item()
            hits += (out.argmax(1) == b).sum().item()
            seen += a.size(0)
        printed += [running / len(data), running / seen, sum(parts) / seen, sum(parts) / len(data), correct / len(data)]
        printed += [100 * correct / (seen + 1e-8), right / seen, meter.sum / meter.count, correct, running]
        printed += [100.0 * hits / seen, 100.0 * hits / len(data)]
        assert type(running / seen) is type(running / len(data)) is float
    return printed


# The last batches have 1 sample, which both ranks hold, and 3, of which rank 0 has 2.
_NUM_SAMPLES = (41, 43)


def _tutorial_on_ranks() -> Any:
    with equal_reads(ddpshim.world(), lambda: False):
        return [_tutorial(ddpshim.make_loader, ddpshim.wrap_parallel, num) for num in _NUM_SAMPLES]


def test_sums_over_batches_are_those_of_one_process() -> None:
    of_ranks = run_ranks(_tutorial_on_ranks, 2)
    assert of_ranks[0] == of_ranks[1]
    for num, printed in zip(_NUM_SAMPLES, of_ranks[0]):
        assert printed == pytest.approx(_tutorial(DataLoader, lambda net: net, num), rel=1e-12)


def test_one_process_reads_as_ever() -> None:
    before = vars(torch.Tensor).get("item")
    with equal_reads(World(), lambda: False):
        assert vars(torch.Tensor).get("item") is before


def test_the_mean_of_numbers_that_are_large_or_none() -> None:
    assert math.isnan(_mean([math.inf, -math.inf], [1, 1]))
    assert _mean([math.inf, 1.0], [1, 2]) == math.inf
    assert _mean([1e16, 1.0, -1e16], [1, 1, 1]) == 1 / 3


def test_numbers_that_carry_their_rows_are_plain_numbers_in_all_else() -> None:
    rows, uneven = Rows(4, 8), Rows(2, 3)
    mean, total, count = Mean(0.1, rows), Total(0.8, rows, 0.4), Count(5, rows, 2)
    for number, plain in ((mean, 0.1), (total, 0.8), (count, 5)):
        for copied in (pickle.loads(pickle.dumps(number)), copy.deepcopy(number), copy.copy(number)):
            assert type(copied) is type(plain)
            assert copied == plain
        shown = repr(number), str(number), f"{number:.3f}", json.dumps([number]), hash(number), round(number, 1)
        assert shown == (repr(plain), str(plain), f"{plain:.3f}", json.dumps([plain]), hash(plain), round(plain, 1))
        assert (number == plain, number < plain, np.array([number]).tolist()) == (True, False, [plain])
        assert torch.tensor(number, dtype=torch.float64).item() == plain
    assert f"{count:d}" == "5"
    assert 0.1 * 4 != mean * 4 == 4 * mean == 0.1 * 8  # its rows
    assert (type(mean * 5), mean * 5, type(mean + 4), mean + 4) == (Mean, 0.5, float, 4.1)
    both = sum([total, Total(0.3, uneven, 0.2)])
    assert (both, both.rows, both.todays) == (pytest.approx(1.1), Rows(6, 11), pytest.approx(0.6))
    assert (both - total).rows == uneven
    seen = 0
    seen += 6
    for quotient in (both / seen, both / (seen + 1e-8), 2 * both / seen / 2, both / max(seen, 1), both / float(seen)):
        assert (quotient, type(quotient)) == (pytest.approx(0.1), float)
    assert (both / 11, both / 5, both / both) == pytest.approx((0.1, 0.22, 1))
    data = [0] * 4
    size = len(data)
    seen = 0
    seen += 4
    # The same number is not the number of rows if it is a constant or the length of a list.
    quotients = [total / len(data)]
    quotients.append(total / size)
    quotients.append(total / 4)
    quotients.append(total / seen)
    assert quotients == [0.2, 0.2, 0.2, 0.1]
    more = count + 0 + Count(2, uneven, 1)
    seen = sum([4, 2])
    assert (more, type(more), more.rows, more / 7) == (7, Count, Rows(6, 11), 1)
    assert (100 * more / seen, more * 0.5 / seen) == pytest.approx((700 / 11, 3.5 / 11))
    assert (type(100 * more), type(more * 0.5)) == (Count, Total)
    shown = sum([FloatCount(5, rows, 2), FloatCount(2, uneven, 1)])
    assert (100.0 * shown / seen, type(100.0 * shown)) == (pytest.approx(700 / 11), Total)
    assert (f"{shown} {shown!r} {shown:d}", range(9)[shown], shown) == ("7 7 7", 7, 7)
    assert type(copy.deepcopy(shown)) is int
    weight = torch.ones(1, requires_grad=True)
    assert [(weight / count).item(), (count * weight).item(), (weight + total).item()] == pytest.approx([0.5, 2, 1.4])


class _Loss(float):
    """Notes what its reads are used for; the batch has 4 rows on this rank."""

    def __init__(self, value: float = 0.5) -> None:
        self.sources, self.found = Sources(), ""

    def item(self) -> float:
        product = self.sources.product(sys._getframe(1), 4)
        count = self.sources.count(sys._getframe(1), 4)
        self.found = "" if product is None else product.text + " " * (not product.is_tallied)
        self.found = self.found if count is None else f"count {count[0].__name__}"
        return 0.5

    def sum(self) -> _Loss:
        return self


_USES = {  # what is found; a space at the end: but is not only added up
    "total += loss.item() * len(x)": "loss.item() * len(x)",
    "total = total + x.size(0) * loss.item()": "x.size(0) * loss.item()",
    "total += (\n  2 * loss.item() *\n  batch['x'].shape[0])": "2 * loss.item() * batch['x'].shape[0]",
    "total += loss.item() / 3 * x.size()[0]": "loss.item() / 3 * x.size()[0]",
    "n, m = x.shape; total += loss.item() * n": "loss.item() * n",
    "n = len(x); now = loss.item(); total += n * now; print(now)": "n * now",
    "n = len(x); now = loss.item(); total += n * now; data.append(now)": "n * now ",
    "seen = 4; total += loss.item() * len(x); y = 2 * total / seen": "loss.item() * len(x)",
    "seen = 4; total += loss.item() * len(x); y = float(total) / seen": "loss.item() * len(x) ",
    "seen = 4; total += loss.item() * len(x); y = total * (1 / seen)": "loss.item() * len(x) ",
    "total += loss.item() * len(x); y = float(total) / len(data)": "loss.item() * len(x)",
    "total = loss.item() * len(x)": "loss.item() * len(x) ",
    "total += loss.item() * len(x) / 2": "loss.item() * len(x) ",
    "total += float(loss.item()) * x.size(0)": "",
    "data.append(loss.item() * len(x))": "loss.item() * len(x)",
    "data.append(loss.item() * len(x)); y = max(data) / 4": "loss.item() * len(x) ",
    "f(loss.item(), n=x.size(0))": "f(loss.item(), n=x.size(0))",
    "total += loss.item() * x.size(1)": "",  # 3
    "total += loss.item() * steps": "",  # a constant, 4
    "n = 4; total += loss.item() * n": "",
    "total += loss.item() * len(data)": "",  # a list of 4
    "total += loss.item() + len(x)": "",
    "total += loss.item() ** len(x)": "",
    "total += max(loss.item(), len(x))": "",
    "total += loss.item(); n = len(x); total *= n": "",
    "total += g(x > loss).sum().item()": "count int",
    "s = g(x.eq(loss)).sum(); total += s.item(); y = 100 * total / steps": "count int",
    "total += g(batch['x']).sum().item(); y = 100.0 * total / len(data)": "count int",
    "total += g(x).sum().item(); y = 100.0 * total / steps": "count float",
    "total += g(x).sum().item(); y = float(total) / steps": "",
    "total = g(x).sum().item()": "",  # perhaps a divisor of the loss
    "data.append(g(x).sum().item())": "",  # perhaps lengths
    "total += g(x[:4]).sum().item()": "",
    "total += g(net.weight).sum().item()": "",
    "total += g(weight).sum().item()": "",
}


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_a_number_is_used_for_is_found_in_the_source(is_inside: bool, tmp_path: Path) -> None:
    loss, x, path = _Loss(), torch.zeros(4, 3), str(tmp_path / "train.py")
    held = {"x": x, "batch": {"x": x}, "data": [1] * 4, "steps": 4, "net": nn.Linear(2, 4)}
    functions = {"g": lambda x: loss, "f": lambda x, n: 0, "weight": nn.Parameter(torch.ones(4))}
    for has_source in (True, False):
        for text, found in _USES.items():
            lines = text.replace("; ", "\n").splitlines()
            source = "\n".join(["def main():", " total = 0", *(f" {line}" for line in lines), "main()"])
            source = source if is_inside else "\n".join(lines)
            linecache.cache[path] = len(source), None, source.splitlines(True) if has_source else [], path
            loss.sources, loss.found = Sources(), ""
            exec(compile(source, path, "exec"), {"loss": loss, "total": 0, **held, **functions})
            assert loss.found == (found if has_source else ""), text
