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
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener
from typing import Any, Callable, NamedTuple

import torch

from ddpshim.errors import DataError

_RETRY_S = 0.005
_UID = struct.Struct("3i")  # what SO_PEERCRED gives: process, user, group


class Address(NamedTuple):
    """Where the workers of one pass over one loader meet on a node."""

    name: str  # secret, and of this loader and node
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
        self._of_ranks: dict[int, Any] = {}

    def _lines(self) -> dict[int, Any]:
        if not self._of_ranks:
            self._of_ranks = self._accepted() if self.is_owner else {-1: self._connected()}
        return self._of_ranks

    def _accepted(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        with Listener(self._name, "AF_UNIX", self._address.local_size) as waiting:
            while len(found) < self._address.local_size - 1:
                line = waiting.accept()
                if _is_ours(line):
                    found[line.recv()] = line
        return found

    def _connected(self) -> Any:
        while True:
            with contextlib.suppress(ConnectionRefusedError):  # it has not started yet
                line = Client(self._name, "AF_UNIX")
                break
            time.sleep(_RETRY_S)
        if not _is_ours(line):
            raise DataError(f"the socket of {self._owner} belongs to another user")
        line.send(self._address.rank)
        return line

    def send(self, of_rank: Callable[[int], Any]) -> None:
        """Send each peer what `of_rank` returns for its rank. For the owner."""
        for rank, line in self._lines().items():
            message = io.BytesIO()
            torch.save(of_rank(rank), message)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended this pass
                line.send_bytes(message.getbuffer())

    def receive(self) -> Any:
        """Return what the owner has sent."""
        line = self._lines()[-1]
        with self._naming():
            message = line.recv_bytes()
        return torch.load(io.BytesIO(message), weights_only=False)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:  # the latter also in the middle of a message
            raise DataError(
                f"{self._owner}, which fetches batches for all ranks of the node, or one of those that get their rows, "
                "has ended: it was killed, or its rank failed. Its rank says why"
            ) from error

    def all(self, answer: bool) -> bool:
        """Return whether `answer` is true on the owner and on all its peers."""
        lines = self._lines()
        with self._naming():
            if not self.is_owner:
                lines[-1].send(answer)
                return bool(lines[-1].recv())
            answers = [answer, *(line.recv() for line in lines.values())]
        for line in lines.values():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                line.send(all(answers))
        return all(answers)


def _is_ours(line: Any) -> bool:
    option: int = socket.SO_PEERCRED  # type: ignore[attr-defined, unused-ignore]
    with socket.fromfd(line.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        return bool(_UID.unpack(end.getsockopt(socket.SOL_SOCKET, option, _UID.size))[1] == os.getuid())
