"""What a program reads out of tensors on two ranks: the main rank's number."""

from __future__ import annotations

import logging
import math
import re
import statistics
import struct
import threading
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import ddpshim
from ddpshim.errors import WorldError
from ddpshim.job import news
from ddpshim.process.job import current
from ddpshim.rows.loader import DataLoader
from ddpshim.rows.tensor import Counts
from ddpshim.trainers.unedited.reads import equal_reads
from tests.one_process.parts import below
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
_OWN = (0.125, 0.625)  # of the two ranks
_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    ".item()": lambda loss: loss.item(),
    "float": lambda loss: float(loss.detach()),
    "int": lambda loss: int(loss.detach() * 8),
    "f-string": lambda loss: f"{loss:.3f}",
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
    "count": lambda loss: int((torch.arange(4) < 8 * loss).sum()),
    "yes": lambda loss: bool(loss < 0.3),
    "equal": lambda loss: (torch.tensor(0.1).item(), torch.tensor(1e-45).item(), bool(torch.tensor(True))),
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


def _reads() -> dict[str, Any]:
    here = ddpshim.world()
    loss = torch.tensor(_OWN[here.rank], requires_grad=True) * 1
    before = {name: vars(torch.Tensor).get(name) for name in ("item", "__float__", "__format__", "numpy", "__bool__")}
    with equal_reads(here):
        out = {name: read(loss) for name, read in _READS.items()}
        out["of a class of its own"] = torch.tensor(_OWN[here.rank]).as_subclass(_Own).item()
        nan = torch.tensor(struct.unpack("<i", struct.pack("<i", 0x7FC00001))[0], dtype=torch.int32).view(torch.float32)
        out["nan"] = nan.item(), (loss * (1 if here.rank else math.nan)).item(), (loss.log() * math.inf).item()
        out["in a network"] = _Peeks()(torch.tensor([_OWN[here.rank], 0.2, here.rank]))
        records: list[str] = []
        log = logging.Logger("log")
        log.addHandler(logging.Handler())
        log.handlers[0].emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        log.warning("loss %.3f", loss.detach())
        out["logged"] = records
        plateau = ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), patience=0)
        plateau.step(loss.detach())
        out["plateau"] = plateau.best
        with current().part(Counts).alone():
            out["alone"] = loss.item()
        out["thread"] = []
        thread = threading.Thread(target=lambda: out["thread"].append(loss.item()))
        thread.start()
        thread.join()
        packages = "torch.optim.adam", "tqdm.std", "ddpshim.model"
        out["of others"] = [_in_the_name_of(package, loss) for package in packages]
        out["of the program's"] = [_in_the_name_of(package, loss) for package in ("__main__", "policies.act")]
        out["several"] = (torch.arange(3) + here.rank).tolist()
    out["after"] = loss.item()
    assert {name: vars(torch.Tensor).get(name) for name in before} == before
    return out


def test_numbers_are_those_of_the_main_rank() -> None:
    of_main = torch.tensor(_OWN[0], requires_grad=True) * 1
    for own, out in zip(_OWN, run_ranks(_reads, 2)):
        assert [out.pop(name) for name in ("alone", "after", "thread")] == [own, own, [own]]
        assert (out.pop("of others"), out.pop("of a class of its own")) == ([own] * 3, own)
        assert out.pop("several") == ([0, 1, 2] if own == _OWN[0] else [1, 2, 3])
        for name, read in _READS.items():
            assert out.pop(name) == read(of_main), name
        assert out.pop("of the program's") == [_OWN[0]] * 2
        assert out.pop("in a network") == (1, False, _OWN[0])
        assert list(map(math.isnan, out["nan"][:2])) == [True, True]
        assert out.pop("nan")[2] == -math.inf
        assert (out.pop("logged"), out.pop("plateau")) == (["loss 0.125"], _OWN[0])
        assert not out


def _later() -> list[float]:
    """What is read at one line: from the 13th number on, ranks have different ones. What is asserted is not told."""
    here = ddpshim.world()
    with equal_reads(here):
        if here.is_main:
            below(torch.zeros(()), 1)
        found = []
        for i in range(16):
            found.append(torch.tensor(float(i) + here.rank * (i >= 12)).item())
            if i == 13:
                news.settle()  # as a backward pass does
        return found


def test_numbers_that_were_equal_are_compared_later() -> None:
    for rank, found in enumerate(run_ranks(_later, 3)):
        assert found == [*range(12), 12 + rank, 13 + rank, 14, 15]


def _part(kind: str) -> None:
    here = ddpshim.world()
    if kind == "another line":
        if here.is_main:
            torch.zeros(()).item()
        else:
            torch.zeros(()).item()
    elif kind == "another line, later":
        for i in range(15):
            torch.ones(()).item()
            if i == 11 and here.is_main:
                torch.zeros(()).item()
        news.settle()
    elif "loader" in kind or "batch" in kind:
        one = DataLoader(TensorDataset(torch.zeros(12, 2)), 4, sampler=range(12 - 4 * here.rank))
        other = DataLoader(TensorDataset(torch.zeros(12, 2)), 4)
        if kind == "another loader, later":
            next(iter(one)), next(iter(other))
        batches = iter(one if here.is_main or "another batch" in kind else other)
        next(batches)
        if kind == "another batch":
            next(iter(one) if here.is_main else batches)
        if kind == "another batch or none":
            list(batches)
    elif here.is_main:
        here.gather(1)
    else:
        torch.zeros(()).item()


def _error_of(kind: str) -> str:
    with equal_reads(ddpshim.world()), pytest.raises(WorldError) as raised:
        _part(kind)
    return str(raised.value)


@pytest.mark.parametrize(
    "kind", ["another line", "another line, later", "a collective", "another loader", "another loader, later"]
)
def test_ranks_that_read_at_different_lines_stop(kind: str) -> None:
    for text in run_ranks(_error_of, 2, kind):
        lines = re.findall(r"rank \d .*?test_reads\.py:(\d+)", text)
        assert len(lines) == 2, text
        assert lines[0] != lines[1]


def test_ranks_that_take_other_batches_of_one_loader_stop() -> None:
    for text in run_ranks(_error_of, 2, "another batch"):
        assert re.findall(r"rank \d takes a batch of .*?test_reads.py:\d+ \((.*?)\)", text) == [
            "batch 1 of epoch 2",
            "batch 2 of epoch 1",
        ]
    for text in run_ranks(_error_of, 2, "another batch or none"):
        assert "(batch 3 of epoch 1); rank 1 has read all of its data at " in text
