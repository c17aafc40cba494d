"""Lets one data worker of a node fetch a batch for all its ranks: worker w of rank w % L, as in one process.

Its peers, the workers w of the other L - 1 ranks, get their rows over a Unix socket in Linux's abstract namespace: no
file is left behind, whatever ends. Main processes wait for their own workers only.
"""

from __future__ import annotations

import contextlib
import io
import os
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

    name: str  # secret, and of this loader and pass
    rank: int
    local_rank: int
    local_size: int


class Lines:
    """A worker's connections to its peers, made with the first message."""

    def __init__(self, address: Address, worker: int) -> None:
        self._address, self._name = address, f"\0{address.name}/{worker}"
        owner = worker % address.local_size
        self.is_owner = address.local_rank == owner
        self.where = f"in DataLoader worker process {worker}"
        self._owner = f"data worker {worker} of local rank {owner}"
        self._of_ranks: dict[int, socket.socket] = {}  # on the owner those of its peers, by rank; else the owner's: -1

    def _lines(self) -> dict[int, socket.socket]:
        if not self._of_ranks:
            self._of_ranks = self._accepted() if self.is_owner else {-1: self._connected()}
        return self._of_ranks

    def _accepted(self) -> dict[int, socket.socket]:
        found: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.bind(self._name)
            waiting.listen(self._address.local_size)
            while len(found) < self._address.local_size - 1:
                line = waiting.accept()[0]
                if _is_ours(line):
                    found[struct.unpack("<q", _read(line, 8))[0]] = line
        return found

    def _connected(self) -> socket.socket:
        while True:
            line = socket.socket(socket.AF_UNIX)
            try:
                line.connect(self._name)
            except ConnectionRefusedError:  # it has not started yet
                line.close()
                time.sleep(_RETRY_S)
            else:
                break
        if not _is_ours(line):
            raise DataError(f"the socket of {self._owner} belongs to another user")
        line.sendall(struct.pack("<q", self._address.rank))
        return line

    def send(self, of_rank: Callable[[int], Any]) -> None:
        """Send each peer what `of_rank` returns for its rank. For the owner."""
        for rank, line in self._lines().items():
            message = io.BytesIO()
            torch.save(of_rank(rank), message)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended this pass
                line.sendall(struct.pack("<q", message.tell()))
                line.sendall(message.getbuffer())

    def receive(self) -> Any:
        """Return what the owner has sent."""
        line = self._lines()[-1]
        with self._naming():
            (size,) = struct.unpack("<q", _read(line, 8))
            return torch.load(io.BytesIO(_read(line, size)), weights_only=False)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise DataError(
                f"{self._owner}, which fetches batches for all ranks of the node, or one of those that get their rows, "
                "has ended: it was killed, or its rank failed. Its rank says why"
            ) from None

    def all(self, answer: bool) -> bool:
        """Return whether `answer` is true on the owner and on all its peers."""
        lines = self._lines()
        with self._naming():
            if not self.is_owner:
                lines[-1].sendall(bytes([answer]))
                return bool(_read(lines[-1], 1)[0])
            answers = [answer, *(bool(_read(line, 1)[0]) for line in lines.values())]
        for line in lines.values():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                line.sendall(bytes([all(answers)]))
        return all(answers)


def _is_ours(line: socket.socket) -> bool:
    option: int = socket.SO_PEERCRED  # type: ignore[attr-defined, unused-ignore]
    return bool(_UID.unpack(line.getsockopt(socket.SOL_SOCKET, option, _UID.size))[1] == os.getuid())


def _read(line: socket.socket, num: int) -> bytearray:
    found = bytearray(num)
    view = memoryview(found)
    while view:
        num_read = line.recv_into(view)
        if not num_read:
            raise EOFError
        view = view[num_read:]
    return found
