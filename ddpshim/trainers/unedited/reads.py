"""Makes a program read the main rank's number on all ranks, so that decisions are equal where devices round otherwise.

Every rank runs the whole program, and numbers are those of whole batches. They may differ in rounding: by GPUs of
different kinds, or sums in an order that a GPU does not fix. So the first numbers of each line are fetched. If they are
equal, ranks read their own from then on, and compare them before the next backward pass or gather, all in one message.
Once two differ, all numbers are fetched again. (A decision by one that differed may part the ranks: that message then
says so, or the comparison of weights.)
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import os
import struct
import sys
import threading
import zlib
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Callable, Optional

import torch
from torch import nn

from ddpshim.job import news
from ddpshim.job.world import World
from ddpshim.model.backward import say_nan
from ddpshim.process.job import current
from ddpshim.process.observed import Progress
from ddpshim.process.replaced import replaced
from ddpshim.process.say import count
from ddpshim.rows.arriving import arrived, land
from ddpshim.rows.tensor import Counts

_ASSERTION = "LOAD_ASSERTION_ERROR"  # in Python 3.14: LOAD_COMMON_CONSTANT, so that it is a read like others
_NUM_FETCHED = 10  # of each line
_NUMBERS = ("item", "__float__", "__int__", "__index__", "__bool__", "tolist", "numpy", "__array__", "__format__")
# These read for their own purposes: the same on all ranks, or at different times on each (a progress bar).
_NOT_THE_PROGRAM = ("torch", "torchvision", "functorch", "ddpshim", "tqdm", "wandb")
# These read on behalf of their callers.
_ON_BEHALF = ("numpy", "logging", "statistics", "json", "string", "contextlib", "functools", "pprint", "reprlib", "csv")
_TORCHS_ON_BEHALF = (
    *("torch.optim.lr_scheduler", "torch.optim.lbfgs", "torch.utils.tensorboard"),
    "torch._dynamo.eval_frame",  # between a stand-in and its caller
)


@contextlib.contextmanager
def equal_reads(here: World) -> Iterator[None]:
    """Within this block, the program reads the main rank's number from a tensor. Each such read is collective.

    Only reads by the program's lines in the thread that entered count, not those of torch, or of a library for itself,
    nor what a rank reads alone (it fetches a sample, or plays a rollout). Raises WorldError if ranks read at different
    lines, or one reads while another is in a collective of `World`.
    """
    decorators: Any = importlib.import_module("torch._dynamo.decorators")
    reads = _EqualReads(here)
    with contextlib.ExitStack() as stack:
        for name in _NUMBERS:
            original = getattr(torch.Tensor, name)
            # Not torch.compiler.disable, whose wrapper makes each read of an optimizer slower.
            stand_in = decorators.skip(functools.wraps(original)(reads.read(original)))
            stack.enter_context(replaced(torch.Tensor, name, stand_in))
        try:
            yield
        except SystemExit:
            land()  # functions of atexit may read a loss
            raise
        land()
        news.settle()


class _EqualReads:
    """The reads of a program in one job."""

    def __init__(self, here: World) -> None:
        self._here, self._counts, self._thread = here, current().part(Counts), threading.get_ident()
        self._item: Callable[[torch.Tensor], Any] = torch.Tensor.item
        self._num_reads, self._fetches_all = 0, False
        self._lines: dict[tuple[CodeType, int, torch.dtype], list[int]] = {}  # hash and number of reads by line
        # Functions that read for their own purposes, by id: codes of different functions may be equal.
        self._of_others: dict[int, CodeType] = {}

    def read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the stand-in for a method that reads a tensor."""

        def of_main(tensor: torch.Tensor, caller: FrameType, *arguments: Any, **options: Any) -> Any:
            line = self._line(tensor, caller)  # a row tensor has more than one number: torch passes it on to its rules
            return original(tensor if line is None else self._of_main(tensor, line), *arguments, **options)

        of_main = torch.compiler.disable(of_main)

        def read(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            caller, tensor = sys._getframe(1), arrived(tensor)
            if id(caller.f_code) in self._of_others and type(tensor) is torch.Tensor:
                return original(tensor, *arguments, **options)
            if _is_of_others(caller):
                self._of_others[id(caller.f_code)] = caller.f_code
            return of_main(tensor, caller, *arguments, **options)

        return read

    def _line(self, tensor: torch.Tensor, caller: Optional[FrameType]) -> Optional[FrameType]:
        """Return the program's frame that reads `tensor`; None if the number stays this rank's own. Local.

        So does the one of an `assert`, which ends the rank, and with it the job. (A replay of a capture tells nothing.)
        """
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        if not is_plain or tensor.dim() or tensor.is_complex() or tensor.is_meta:
            return None
        if threading.get_ident() != self._thread or not self._counts.is_in_lock_step():
            return None
        line = _of_the_program(caller)
        return None if line is None or _asserts(line.f_code, line.f_lasti) else line

    def _of_main(self, tensor: torch.Tensor, line: FrameType) -> torch.Tensor:
        """Return `tensor`, if the main rank has the same number, else one with its number (collective)."""
        value = self._item(tensor.detach())
        if tensor.is_cuda and value != value:  # losses on a GPU are not read for this: the host would wait
            say_nan(f"the program reads NaN after {count(current().part(Progress).num_passes, 'backward pass', 'es')}")
        bits = struct.unpack("<q", struct.pack("<d", value))[0] if tensor.is_floating_point() else int(value)
        of_main = self._bits_of_main(bits, tensor, line)
        if of_main == bits:
            return tensor
        number = struct.unpack("<d", struct.pack("<q", of_main))[0] if tensor.is_floating_point() else of_main
        with torch.no_grad():
            return tensor.detach().clone().fill_(number)

    def _bits_of_main(self, bits: int, tensor: torch.Tensor, line: FrameType) -> int:
        """Return the main rank's bits; this rank's if they were equal so far (collective)."""
        self._num_reads += 1
        key = line.f_code, line.f_lineno, tensor.dtype
        known = self._lines.get(key)
        if known is None:
            file = os.path.basename(line.f_code.co_filename).partition(">")[0]  # a graph's number is a rank's own
            what = f"{file}:{line.f_lineno} {tensor.dtype}"
            known = self._lines[key] = [zlib.crc32(what.encode(errors="backslashreplace")), 0]
        known[1] += 1
        tag, file = known[0] ^ self._num_reads, key[0].co_filename
        place = f"reads a number from a tensor at {file}:{key[1]} (read {self._num_reads})"

        def of_main(told: list[Any]) -> int:
            self._fetches_all = self._fetches_all or any(theirs != told[0][0] for theirs, _ in told)
            return int(told[0][0])

        fetches = known[1] <= _NUM_FETCHED or self._fetches_all
        found = news.tell((bits, tag), of_main, fetches, place, known[0])
        return bits if found is None else int(found)


@functools.lru_cache(maxsize=1024)
def _asserts(code: CodeType, place: int) -> bool:
    """Whether the instruction at `place` decides an `assert`. Local."""
    names = (dis.opname[op] for op in code.co_code[place + 2 :: 2])
    return next((name for name in names if not name.startswith(("CACHE", "POP_JUMP", "<0>"))), "") == _ASSERTION


def _is_of_others(frame: FrameType) -> bool:
    """Whether this function reads neither for the program nor on behalf of its caller. Local."""
    name = str(frame.f_globals.get("__name__"))
    return name.partition(".")[0] in _NOT_THE_PROGRAM and not name.startswith(_TORCHS_ON_BEHALF)


def _of_the_program(frame: Optional[FrameType]) -> Optional[FrameType]:
    """Return the frame on whose behalf this one reads; None if it is not the program's. Local."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if _is_of_others(frame):
            return None
        if package not in (*_ON_BEHALF, "torch"):
            return frame
        frame = frame.f_back
    return None
