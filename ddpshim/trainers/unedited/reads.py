"""Makes a program read the same numbers on all ranks, so that its logs and decisions are those of one process.

Each rank has a part of the batch, so its loss covers only its rows. When the program reads a number from a tensor, the
ranks exchange it in one small message: a floating-point number becomes the mean over the rows of all ranks, any other
number the main rank's. A number that is equal on all ranks stays unchanged, bitwise. See docs/numbers_read.md.
"""

from __future__ import annotations

import ast
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
from ddpshim.job import messages, plain, shares
from ddpshim.job.job import current
from ddpshim.job.replaced import replaced
from ddpshim.job.say import say
from ddpshim.job.world import CROSSED_DEADLINE_S, World
from ddpshim.trainers.unedited import losses, tallies
from ddpshim.trainers.unedited.places import say_on_main
from ddpshim.trainers.unedited.products import Sources

_NUMBERS = ("__float__", "__int__", "__index__", "__bool__")
_ARRAYS = ("tolist", "numpy", "__array__")
# These read for their own purposes: the same on all ranks, or at different times on each (a progress bar).
_NOT_THE_PROGRAM = ("torch", "torchvision", "functorch", "ddpshim", "tqdm", "wandb")
# These read on behalf of their callers.
_ON_BEHALF = ("numpy", "logging", "statistics", "json", "string", "contextlib", "functools", "pprint", "reprlib", "csv")
_TORCHS_ON_BEHALF = (
    *("torch.optim.lr_scheduler", "torch.optim.lbfgs", "torch.utils.tensorboard"),
    "torch._dynamo.eval_frame",  # between a stand-in and its caller
)
_MODULE_CALL = "torch.nn.modules.module"


@contextlib.contextmanager
def equal_reads(here: World, is_local: Callable[[], bool]) -> Iterator[None]:
    """Within this block, the program reads the same number from a tensor on all ranks. Each such read is collective.

    Only reads by the program's lines in the thread that entered count, not those of torch, or of a library for itself.
    An integer or bool that a network reads while it computes stays the rank's own: it describes the rank's rows.

    Args:
        is_local: whether this rank now does something that others do not: fetch a sample, or play a rollout alone.

    Raises:
        WorldError: ranks read at different lines, or one reads while another is in a collective of `World`.
    """
    if here.world_size == 1:
        yield
        return
    reads = _Reads(here, is_local)
    kinds = {"item": reads.item, **dict.fromkeys(_NUMBERS, reads.number), **dict.fromkeys(_ARRAYS, reads.array)}
    with contextlib.ExitStack() as stack:
        for name, kind in {**kinds, "__format__": reads.formatted, "__repr__": reads.text}.items():
            original = getattr(torch.Tensor, name)
            stand_in = torch.compiler.disable(functools.wraps(original)(kind(original)))
            stack.enter_context(replaced(torch.Tensor, name, stand_in))
        yield


class _Reads:
    """The reads of a program in one job."""

    def __init__(self, here: World, is_local: Callable[[], bool]) -> None:
        self._here, self._is_local = here, is_local
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._item: Callable[[torch.Tensor], Any] = torch.Tensor.item
        self._named: set[str] = set()  # the lines that were reported
        self._num_reads = 0

    def number(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the stand-in for a method that returns a Python number."""

        def read(tensor: torch.Tensor) -> Any:
            line = self._line(tensor, sys._getframe(1))
            return original(tensor if line is None else self._of_all(tensor, line))

        return read

    def item(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the stand-in for `item`, whose number may carry its rows; see `tallies`."""

        def read(tensor: torch.Tensor) -> Any:
            line = self._line(tensor, sys._getframe(1))
            if line is None:
                return original(tensor)
            tally = self._tally(tensor, line)
            number = original(self._of_all(tensor, line, tally=tally))
            return number if tally is None else tally.carrying(number, lambda: original(tensor))

        return read

    def array(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the stand-in for a method that converts a whole tensor; it acts on zero-dimensional tensors only."""

        def read(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            line = None if tensor.dim() else self._line(tensor, sys._getframe(1))
            if line is None or ((tensor.requires_grad or tensor.is_cuda) and original.__name__ != "tolist"):
                return original(tensor, *arguments, **options)  # torch may raise its own error
            return original(self._of_all(tensor, line), *arguments, **options)

        return read

    def formatted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the stand-in for the method that f"{loss:.3f}" calls."""

        def read(tensor: torch.Tensor, *arguments: Any) -> Any:
            line = None if tensor.dim() else self._line(tensor, sys._getframe(1))
            return original(tensor if line is None else self._alike(tensor, line), *arguments)

        return read

    def text(self, original: Callable[..., str]) -> Callable[..., str]:
        """Return the stand-in for the method that print(loss) calls."""

        def read(tensor: torch.Tensor, **options: Any) -> str:
            line = None if tensor.dim() else self._line(tensor, sys._getframe(1))
            alike = tensor if line is None else self._alike(tensor, line)
            own = original(tensor, **options)
            if alike is tensor:
                return own
            num = len(original(tensor.detach(), **options)) - 1  # characters before grad_fn
            return original(alike, **options)[:-1] + own[num:]

        return read

    def _alike(self, tensor: torch.Tensor, line: FrameType) -> torch.Tensor:
        """Return `tensor` if its number is equal on all ranks, else a tensor with the common number (collective)."""
        own = tensor.detach().cpu()
        of_all = self._of_all(tensor, line, own)
        return tensor if of_all is own else of_all.to(tensor.device)

    def _line(self, tensor: torch.Tensor, caller: Optional[FrameType]) -> Optional[FrameType]:
        """Return the program's frame that reads `tensor`; None if the number stays this rank's own. Local."""
        is_number = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel() == 1
        if not is_number or tensor.is_complex() or tensor.is_meta:
            return None
        if threading.get_ident() != self._thread or os.getpid() != self._process:
            return None
        line = _of_the_program(caller)
        if line is None or self._is_local() or (not tensor.is_floating_point() and _is_in_a_network(line)):
            return None
        return line

    def _tally(self, tensor: torch.Tensor, line: FrameType) -> Optional[tallies.Tally]:
        """Return what the number becomes if the program multiplies it by rows of the batch, or counts them. Local."""
        share, sources = shares.at_hand(), current().part(Sources)
        if share is None:
            return None
        rows = tallies.Rows(share.num_rows, share.total(share.num_rows))
        product = sources.product(line, rows.own) if tensor.is_floating_point() else None
        if product is not None:
            return tallies.Tally(rows) if product.is_tallied else None
        is_graph = tensor.grad_fn is not None or losses.reading_of(tensor) != losses.Reading()
        count = None if is_graph else sources.count(line, rows.own)
        return None if count is None else tallies.Tally(rows, *count)

    def _of_all(
        self,
        tensor: torch.Tensor,
        line: FrameType,
        own: Optional[torch.Tensor] = None,
        tally: Optional[tallies.Tally] = None,
    ) -> torch.Tensor:
        """Return `own` (`tensor` on the CPU) if all ranks have the same number; else the common number (collective).

        That is the mean over ranks, the sum for a sum over samples, or the main rank's integer or bool.
        """
        reading = losses.reading_of(tensor) if tensor.is_floating_point() else losses.Reading()
        own = tensor.detach().cpu() if own is None else own
        value = self._item(own) if reading.times == 1 else self._item(own) * reading.times
        bits = _bits(value) if own.is_floating_point() else int(value)
        everyones, is_tallied = self._exchange(bits, reading.weight, own.dtype, line, tally)
        if tally is not None:
            tally.holds = is_tallied
        if is_tallied and tally is not None and tally.counts_as is not None:
            if all(other == bits for other, _ in everyones) and self._are_equal(tally.tensors):
                return own  # the same rows on all ranks, such as a validation batch
            numbers = [other for other, num_rows in everyones if num_rows]
            return own.clone().fill_(_sum([*map(_number, numbers)]) if own.is_floating_point() else sum(numbers))
        if all(other == bits for other, _ in everyones) and (reading.times == 1 or not reading.is_sure):
            return own  # a sum that is equal on all ranks is over weights, not over samples
        if own.is_floating_point():
            if reading.weight is None:
                self._say_of_kept(line)
            if reading.is_mixed:
                self._say_mixed(line)
            if not is_tallied:
                self._say_of_rows(line)
            return own.clone().fill_(_mean([_number(other) for other, _ in everyones], [w for _, w in everyones]))
        self._say([other for other, _ in everyones], own.dtype, line)
        return own.clone().fill_(everyones[0][0])

    def _exchange(
        self,
        bits: int,
        weight: Optional[float],
        dtype: torch.dtype,
        line: FrameType,
        tally: Optional[tallies.Tally],
    ) -> tuple[list[tuple[int, float]], bool]:
        """Return (number, its weight) of each rank, and whether all ranks have a `tally` (collective).

        The weights are the ranks' `weight` if all ranks have one, else their numbers of rows of the batch.
        """
        self._num_reads += 1
        sharing = current().part(shares.Sharing)
        at_hand, last = sharing.of_draws if sharing.share is None else sharing.share, sharing.last[0]
        num_rows = 1 if at_hand is None else at_hand.num_counted
        what = f"{os.path.basename(line.f_code.co_filename)}:{line.f_lineno} {dtype} {self._num_reads} {last}"
        tag = zlib.crc32(what.encode(errors="backslashreplace"))
        counted = num_rows << 2 | (tally is not None) << 1 | (weight is not None)
        everyones = messages.pairs((bits, counted << 32 | tag), self._here.world_size, self._here._peers())
        if any(theirs & 0xFFFFFFFF != tag for _, theirs in everyones):
            self._refuse(line, last)
        numbers, counts = [number for number, _ in everyones], [theirs >> 32 for _, theirs in everyones]
        is_tallied = all(count & 2 for count in counts)
        if weight is not None and all(count & 1 for count in counts):
            weights = messages.pairs((_bits(weight), tag), self._here.world_size, self._here._peers())
            return [*zip(numbers, [_number(theirs) for theirs, _ in weights])], is_tallied
        return [*zip(numbers, [count >> 2 for count in counts])], is_tallied

    def _are_equal(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether all ranks have the same `tensors` (collective)."""
        parts = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        own = zlib.crc32(b"".join(map(plain.bytes_of, parts))), 0
        return all(theirs == own for theirs in messages.pairs(own, self._here.world_size, self._here._peers()))

    def _refuse(self, line: FrameType, last: Any) -> None:
        step = "" if last is None else f", in step {last.step} of epoch {last.epoch}"
        own = f"reads a number from a tensor at {_place(line)}{step} (read {self._num_reads})"
        where = self._here.meet("crossed", own, CROSSED_DEADLINE_S)
        lines = "; ".join(f"rank {rank} {said}" for rank, said in where.items())
        raise WorldError(
            f"ranks are at different lines: {lines}. Their numbers would be mixed up, and ranks would train "
            "differently. They diverged earlier: by a decision on something that is not a tensor (a clock, a file, "
            "entropy, the length of a rank's share of the batch), or in code that one rank runs alone."
        )

    def _say_of_kept(self, line: FrameType) -> None:
        """Report a plain mean over ranks that may have different numbers of rows."""
        sharing = current().part(shares.Sharing)
        kept, given = sharing.kept, sharing.last_given
        totals = () if given is None else (given.total, given.largest[0])
        uneven = next((total for total in totals if total % self._here.world_size), None)
        if sharing.share is None and kept is not None and uneven is not None and not kept.looked_at:
            say_on_main(
                f"{_place(line)} reads a number that differs between ranks, after the pass over a loader that has a "
                f"batch ({uneven} samples) which the ranks do not divide: all ranks take the mean of their numbers. "
                "If the number describes that batch, one process would weight each sample equally"
            )

    def _say_of_rows(self, line: FrameType) -> None:
        """Report a number of the whole batch that the program multiplies by the rows of this rank's share."""
        share, place = shares.at_hand(), _place(line)
        if share is None or not self._here.is_main or place in self._named:
            return
        product = current().part(Sources).product(line, share.num_rows)
        if product is not None and not product.is_in_a_call:
            self._named.add(place)
            total = share.total(share.num_rows)
            say(
                f"{place}: in `{product.text}`, the number read is that of the whole batch ({total} samples), "
                f"but `{ast.unparse(product.size)}` is the rows of this rank's share ({share.num_rows}). Divided by "
                f"the number of all samples, the result is {total / share.num_rows:g} times too small, and so is a "
                "decision on it (an early stop, the best checkpoint). ddpshim uses the rows of all ranks where the "
                "program only adds such products up: total += loss.item() * x.size(0), then total / num_samples"
            )

    def _say_mixed(self, line: FrameType) -> None:
        say_on_main(
            f"{_place(line)} reads a loss whose terms are averaged over ranks in different ways (a mean over samples, "
            "a sum over samples, a mean over unpadded entries). It reads the mean over the ranks; one process would "
            "have read another number. Gradients are those of one process, and so are the terms if they are read "
            "one by one"
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
    """Return the weighted mean of `values`. Finite values are summed exactly and rounded once."""
    if not sum(weights):
        weights = [1] * len(values)
    pairs = [(value, weight) for value, weight in zip(values, weights) if weight]
    if len({weight for _, weight in pairs}) == 1:
        return _sum([value for value, _ in pairs]) / len(pairs)
    return _sum([value * weight for value, weight in pairs]) / sum(weights)


def _sum(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)  # fsum raises for inf - inf


def _of_the_program(frame: Optional[FrameType]) -> Optional[FrameType]:
    """Return the frame on whose behalf this one reads; None if it is not the program's. Local."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        package = name.partition(".")[0]
        if package in _ON_BEHALF or (package == "torch" and name.startswith(_TORCHS_ON_BEHALF)):
            frame = frame.f_back
            continue
        return None if package in _NOT_THE_PROGRAM else frame
    return None


def _is_in_a_network(frame: Optional[FrameType]) -> bool:
    """Whether this line runs inside a module's call. Local."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE_CALL:
            return True
        frame = frame.f_back
    return False


def _place(line: FrameType) -> str:
    return f"{line.f_code.co_filename}:{line.f_lineno}"
