"""Lets one data worker of a node fetch a batch for all its ranks: worker w of rank w % L, as in one process.

Its peers, the workers w of the other L - 1 ranks, get their rows over a Unix socket in Linux's abstract namespace: no
file is left behind, whatever ends. Main processes wait for their own workers only.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import torch

from ddpshim.errors import DataError

IS_POSSIBLE = sys.platform == "linux"
_RETRY_S = 0.005
_UID = struct.Struct("3i")  # what SO_PEERCRED gives: process, user, group


class Address(NamedTuple):
    """Where the workers of one pass over one loader meet on a node."""

    name: str  # secret, and of this loader
    rank: int
    local_rank: int
    local_size: int
    num_passes: int = 0  # that have begun


class Lines:
    """A worker's connections to its peers, made with the first message."""

    def __init__(self, address: Address, worker: int) -> None:
        self._address, self._name = address, f"\0{address.name}/{address.num_passes}/{worker}"
        owner = worker % address.local_size
        self.is_owner = address.local_rank == owner
        self.where = f"in DataLoader worker process {worker}"
        self._owner = f"data worker {worker} of local rank {owner}"
        # On the owner those of its peers, by rank; else the owner's: -1.
        self._of_ranks: dict[int, io.BufferedRWPair] = {}

    def _lines(self) -> dict[int, io.BufferedRWPair]:
        if not self._of_ranks:
            self._of_ranks = self._accepted() if self.is_owner else {-1: self._connected()}
        return self._of_ranks

    def _accepted(self) -> dict[int, io.BufferedRWPair]:
        found: dict[int, io.BufferedRWPair] = {}
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.bind(self._name)
            waiting.listen(self._address.local_size)
            while len(found) < self._address.local_size - 1:
                accepted = waiting.accept()[0]
                if _is_ours(accepted):
                    line = accepted.makefile("rwb")
                    found[pickle.load(line)] = line
        return found

    def _connected(self) -> io.BufferedRWPair:
        owner = socket.socket(socket.AF_UNIX)
        while error := owner.connect_ex(self._name):
            if error != errno.ECONNREFUSED:  # else it has not started yet
                raise OSError(error, f"{os.strerror(error)}: {self._owner}")
            time.sleep(_RETRY_S)
        if not _is_ours(owner):
            raise DataError(f"the socket of {self._owner} belongs to another user")
        line = owner.makefile("rwb")
        _write(line, self._address.rank)
        return line

    def send(self, of_rank: Callable[[int], Any]) -> None:
        """Send each peer what `of_rank` returns for its rank. For the owner."""
        for rank, line in self._lines().items():
            message = io.BytesIO()
            torch.save(of_rank(rank), message)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended this pass
                _write(line, message.getvalue())

    def receive(self) -> Any:
        """Return what the owner has sent."""
        line = self._lines()[-1]
        with self._naming():
            message = pickle.load(line)
        return torch.load(io.BytesIO(message), weights_only=False)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, pickle.UnpicklingError, ConnectionResetError, BrokenPipeError):
            raise DataError(
                f"{self._owner}, which fetches batches for all ranks of the node, or one of those that get their rows, "
                "has ended: it was killed, or its rank failed. Its rank says why"
            ) from None

    def all(self, answer: bool) -> bool:
        """Return whether `answer` is true on the owner and on all its peers."""
        lines = self._lines()
        with self._naming():
            if not self.is_owner:
                _write(lines[-1], answer)
                return bool(pickle.load(lines[-1]))
            answers = [answer, *map(pickle.load, lines.values())]
        for line in lines.values():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                _write(line, all(answers))
        return all(answers)


def _is_ours(line: socket.socket) -> bool:
    option: int = socket.SO_PEERCRED  # type: ignore[attr-defined, unused-ignore]
    return bool(_UID.unpack(line.getsockopt(socket.SOL_SOCKET, option, _UID.size))[1] == os.getuid())


def _write(line: io.BufferedRWPair, value: Any) -> None:
    pickle.dump(value, line, protocol=5)  # which writes bytes as they are
    line.flush()
