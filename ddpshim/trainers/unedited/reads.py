"""Makes a program read the same numbers on all ranks, so that its logs and decisions are those of one process.

Ranks share a batch, so a loss is that of a rank's rows. When the program takes a number out of a tensor, the ranks
exchange it in one small message: a floating-point number becomes the mean over the rows of all ranks, any other the
main rank's. A number that all ranks have in common stays what it is, to the last bit. See docs/numbers_read.md.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import struct
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Callable, Optional

import torch
from torch import nn

from ddpshim.errors import WorldError
from ddpshim.job import messages, shares
from ddpshim.job.job import current
from ddpshim.job.replaced import replaced
from ddpshim.job.say import say
from ddpshim.job.world import CROSSED_DEADLINE_S, World
from ddpshim.trainers.unedited import losses
from ddpshim.trainers.unedited.places import say_on_main

_NUMBERS = ("item", "__float__", "__int__", "__index__", "__bool__")
_ARRAYS = ("tolist", "numpy", "__array__")
# What these read, they read for their own purposes: alike on all ranks, or at other times on each (a progress bar).
_NOT_THE_PROGRAM = ("torch", "torchvision", "functorch", "ddpshim", "tqdm", "wandb")
# What these read, they were given by who calls them.
_ON_BEHALF = ("numpy", "logging", "statistics", "json", "string", "contextlib", "functools", "pprint", "reprlib", "csv")
_TORCHS_ON_BEHALF = (
    *("torch.optim.lr_scheduler", "torch.optim.lbfgs", "torch.utils.tensorboard"),
    "torch._dynamo.eval_frame",  # between a stand-in and its caller
)
_MODULE_CALL = "torch.nn.modules.module"


@contextlib.contextmanager
def equal_reads(here: World, is_local: Callable[[], bool]) -> Iterator[None]:
    """Meanwhile a number that the program reads out of a tensor is the same on all ranks (each such read: collective).

    In the thread that enters, and where one of its own lines reads: not torch's, nor a library's for itself. An
    integer or bool that a network reads while it computes stays the rank's own: it is about the rank's rows.

    Args:
        is_local: whether this rank does just now what others do not: it asks a dataset for a sample, or plays alone.

    Raises:
        WorldError: ranks read at different lines, or one reads where another is in a collective of World's.
    """
    if here.world_size == 1:
        yield
        return
    reads = _Reads(here, is_local)
    kinds = {**dict.fromkeys(_NUMBERS, reads.number), **dict.fromkeys(_ARRAYS, reads.array)}
    with contextlib.ExitStack() as stack:
        for name, kind in {**kinds, "__format__": reads.formatted, "__repr__": reads.text}.items():
            original = getattr(torch.Tensor, name)
            stand_in = torch.compiler.disable(functools.wraps(original)(kind(original)))
            stack.enter_context(replaced(torch.Tensor, name, stand_in))
        yield


class _Reads:
    """What the program reads in a job."""

    def __init__(self, here: World, is_local: Callable[[], bool]) -> None:
        self._here, self._is_local = here, is_local
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._item: Callable[[torch.Tensor], Any] = torch.Tensor.item
        self._named: set[str] = set()  # the lines that were told of
        self._num_reads = 0

    def number(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The stand-in for a method that returns a number of Python's."""

        def read(tensor: torch.Tensor) -> Any:
            line = self._line(tensor, sys._getframe(1))
            return original(tensor if line is None else self._of_all(tensor, line))

        return read

    def array(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The stand-in for a method that returns all numbers of a tensor, of which it has one and no dimensions."""

        def read(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            line = None if tensor.dim() else self._line(tensor, sys._getframe(1))
            if line is None or ((tensor.requires_grad or tensor.is_cuda) and original.__name__ != "tolist"):
                return original(tensor, *arguments, **options)  # torch may refuse it
            return original(self._of_all(tensor, line), *arguments, **options)

        return read

    def formatted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The stand-in for what f"{loss:.3f}" calls."""

        def read(tensor: torch.Tensor, *arguments: Any) -> Any:
            line = None if tensor.dim() else self._line(tensor, sys._getframe(1))
            return original(tensor if line is None else self._alike(tensor, line), *arguments)

        return read

    def text(self, original: Callable[..., str]) -> Callable[..., str]:
        """The stand-in for what print(loss) calls."""

        def read(tensor: torch.Tensor, **options: Any) -> str:
            line = None if tensor.dim() else self._line(tensor, sys._getframe(1))
            alike = tensor if line is None else self._alike(tensor, line)
            own = original(tensor, **options)
            if alike is tensor:
                return own
            num = len(original(tensor.detach(), **options)) - 1  # of what comes before grad_fn
            return original(alike, **options)[:-1] + own[num:]

        return read

    def _alike(self, tensor: torch.Tensor, line: FrameType) -> torch.Tensor:
        """`tensor` where all ranks have one number in it, else one like it."""
        own = tensor.detach().cpu()
        of_all = self._of_all(tensor, line, own)
        return tensor if of_all is own else of_all.to(tensor.device)

    def _line(self, tensor: torch.Tensor, caller: Optional[FrameType]) -> Optional[FrameType]:
        """The frame of the program that reads `tensor`; None where the number is to stay this rank's. Local."""
        is_number = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel() == 1
        if not is_number or tensor.is_complex() or tensor.is_meta:
            return None
        if threading.get_ident() != self._thread or os.getpid() != self._process:
            return None
        line = _of_the_program(caller)
        if line is None or self._is_local() or (not tensor.is_floating_point() and _is_in_a_network(line)):
            return None
        return line

    def _of_all(self, tensor: torch.Tensor, line: FrameType, own: Optional[torch.Tensor] = None) -> torch.Tensor:
        """`own`, `tensor` on the CPU, where all ranks have one number in it; else one of its kind (collective).

        Of a sum over samples the sum over those of all ranks.
        """
        reading = losses.reading_of(tensor) if tensor.is_floating_point() else losses.Reading()
        own = tensor.detach().cpu() if own is None else own
        value = self._item(own) if reading.times == 1 else self._item(own) * reading.times
        bits = _bits(value) if own.is_floating_point() else int(value)
        everyones = self._exchange(bits, reading.weight, own.dtype, line)
        if all(other == bits for other, _ in everyones) and (reading.times == 1 or not reading.is_sure):
            return own  # what looks like a sum over samples is one over weights
        if own.is_floating_point():
            self._say_of_kept(line)
            if reading.is_mixed:
                self._say_mixed(line)
            return own.clone().fill_(_mean([_number(other) for other, _ in everyones], [w for _, w in everyones]))
        self._say([other for other, _ in everyones], own.dtype, line)
        return own.clone().fill_(everyones[0][0])

    def _exchange(
        self, bits: int, weight: Optional[float], dtype: torch.dtype, line: FrameType
    ) -> list[tuple[int, float]]:
        """(number, by what it counts) of each rank (collective).

        That is `weight`, where all ranks have one, else how many rows of the batch the number is about.
        """
        self._num_reads += 1
        sharing = current().part(shares.Sharing)
        at_hand, last = sharing.of_draws if sharing.share is None else sharing.share, sharing.last[0]
        num_rows = 1 if at_hand is None else at_hand.num_counted
        what = f"{os.path.basename(line.f_code.co_filename)}:{line.f_lineno} {dtype} {self._num_reads} {last}"
        tag = zlib.crc32(what.encode(errors="backslashreplace"))
        to_send = bits, (num_rows << 1 | (weight is not None)) << 32 | tag
        everyones = messages.pairs(to_send, self._here.world_size, self._here._peers())
        if any(theirs & 0xFFFFFFFF != tag for _, theirs in everyones):
            self._refuse(line, last)
        numbers, counts = [number for number, _ in everyones], [theirs >> 32 for _, theirs in everyones]
        if weight is not None and all(count & 1 for count in counts):
            weights = messages.pairs((_bits(weight), tag), self._here.world_size, self._here._peers())
            return [*zip(numbers, [_number(theirs) for theirs, _ in weights])]
        return [*zip(numbers, [count >> 1 for count in counts])]

    def _refuse(self, line: FrameType, last: Any) -> None:
        step = "" if last is None else f", in step {last.step} of epoch {last.epoch}"
        own = f"reads a number out of a tensor at {_place(line)}{step} (read {self._num_reads})"
        where = self._here.meet("crossed", own, CROSSED_DEADLINE_S)
        told = "; ".join(f"rank {rank} {said}" for rank, said in where.items())
        raise WorldError(
            f"ranks are at different lines: {told}. Their numbers would be mixed up, and ranks would train "
            "differently. They diverged earlier: by a decision on something that is not a tensor (a clock, a file, "
            "entropy, the length of a rank's share of the batch), or in code that one rank runs alone."
        )

    def _say_of_kept(self, line: FrameType) -> None:
        """Name a mean over ranks whose rows may be unequally many."""
        sharing = current().part(shares.Sharing)
        kept = sharing.kept
        if sharing.share is None and kept is not None and kept.totals and not kept.looked_at:
            say_on_main(
                f"{_place(line)} reads a number that differs between ranks, after the pass over a loader whose last "
                f"batch ({kept.totals[0]} samples) the ranks do not divide: all take the mean of their numbers. If it "
                "is about that batch, one process would weigh each sample alike"
            )

    def _say_mixed(self, line: FrameType) -> None:
        say_on_main(
            f"{_place(line)} reads a loss that adds up terms of which ranks have shares that count differently (a mean "
            "over samples, a sum over samples, a mean over what is not padding). It reads the mean over the ranks; one "
            "process would have read another number. Gradients are those of one process, and so are the terms, where "
            "they are read one by one"
        )

    def _say(self, of_ranks: list[int], dtype: torch.dtype, line: FrameType) -> None:
        place = _place(line)
        if place in self._named:
            return
        self._named.add(place)
        if self._here.is_main:
            is_bool = dtype == torch.bool
            values = ", ".join(str(bool(value) if is_bool else value) for value in of_ranks)
            kind = "a yes or no" if is_bool else "a whole number"
            say(
                f"{place} reads {kind} that differs between ranks ({values}), since it depends on a rank's share of "
                "the batch. All ranks continue with the main rank's; one process would have that of the whole batch"
            )


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def _mean(values: list[float], weights: Sequence[float]) -> float:
    """The mean of the ranks' means, of a sum that is rounded once."""
    if not sum(weights):
        weights = [1] * len(values)
    pairs = [(value, weight) for value, weight in zip(values, weights) if weight]
    if len({weight for _, weight in pairs}) == 1:
        return _sum([value for value, _ in pairs]) / len(pairs)
    return _sum([value * weight for value, weight in pairs]) / sum(weights)


def _sum(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)  # fsum raises for inf - inf


def _of_the_program(frame: Optional[FrameType]) -> Optional[FrameType]:
    """The frame on whose behalf this one reads; None where that is no line of the program's. Local."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        package = name.partition(".")[0]
        if package in _ON_BEHALF or (package == "torch" and name.startswith(_TORCHS_ON_BEHALF)):
            frame = frame.f_back
            continue
        return None if package in _NOT_THE_PROGRAM else frame
    return None


def _is_in_a_network(frame: Optional[FrameType]) -> bool:
    """Whether this line runs inside of a call of a module. Local."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE_CALL:
            return True
        frame = frame.f_back
    return False


def _place(line: FrameType) -> str:
    return f"{line.f_code.co_filename}:{line.f_lineno}"
