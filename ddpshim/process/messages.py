"""Carries Python values between ranks as bytes that cannot run code, except objects that only pickle can hold.

These are pickled, unless the option `trust_peers` is off: a pickle can make the rank that reads it call anything.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddpshim.errors import WorldError
from ddpshim.process import json_codec

_NOT_ALLOWED = (
    "with trust_peers=no ranks do not unpickle data from other ranks. Send numbers, text, tensors, arrays, and "
    "lists or mappings of them, or leave trust_peers out if only ranks can reach each other's ports"
)


def packed(value: Any, trusts_peers: bool) -> bytes:
    """Return the message for `value`. Local.

    Raises WorldError if it needs pickle and peers are not trusted, and pickle's own errors.
    """
    try:
        return json_codec.dumps(value, pickle.dumps if trusts_peers else None)
    except json_codec.NotPlain as error:
        raise WorldError(f"a value cannot be sent to other ranks ({error}): {_NOT_ALLOWED}.") from None


def unpacked(message: bytes, trusts_peers: bool, sender: int) -> Any:
    """Return the value of `message`. Local. Raises WorldError for a pickle if peers are not trusted, and for junk."""
    try:
        return json_codec.loads(message, pickle.loads if trusts_peers else None)
    except json_codec.NotPlain:
        raise WorldError(f"rank {sender} sent an object: {_NOT_ALLOWED}.") from None
    except json_codec.Broken as error:
        raise WorldError(
            f"rank {sender} sent bytes that are not a message of ddpshim ({error}); ranks would continue with "
            "different values. Install the same ddpshim everywhere, and check whether another process can reach the "
            "ranks' ports."
        ) from error


def key(name: str) -> str:
    """Return `name` as valid UTF-8, which a store requires: names of files can hold any bytes. Local."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class Crossed(Exception):
    """Raised if ranks are in different collectives."""


def gather(value: Any, size: int, group: Any, trusts_peers: bool, what: str) -> list[Any]:
    """Return the values of all `size` ranks of `group`, in rank order (collective).

    Raises Crossed, on all ranks, if their `what` differ.
    """
    own = _as_tensor(packed(value, trusts_peers))
    lengths = _lengths(own.numel(), size, group, what)
    longest = max(lengths)
    everyones = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(size)]
    dist.all_gather(everyones, torch.cat((own, own.new_zeros(longest - own.numel()))), group=group)
    messages = (json_codec.bytes_of(message[:length]) for message, length in zip(everyones, lengths))
    return [unpacked(message, trusts_peers, sender) for sender, message in enumerate(messages)]


def broadcast(value: Any, src: int, rank: int, size: int, group: Any, trusts_peers: bool, what: str) -> Any:
    """Return the value of rank `src`, on every rank of `group` (collective). Raises Crossed; see `gather`."""
    own = _as_tensor(packed(value, trusts_peers)) if rank == src else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = _lengths(own.numel(), size, group, what)[src]
    message = own if rank == src else torch.empty(length, dtype=torch.uint8, device="cpu")
    dist.broadcast(message, src, group=group)
    return value if rank == src else unpacked(json_codec.bytes_of(message), trusts_peers, src)


def _lengths(own: int, size: int, group: Any, what: str) -> list[int]:
    """Return the lengths of all ranks' messages, if all are in the same collective (collective)."""
    lengths, places = zip(*pairs((own, zlib.crc32(what.encode(errors="backslashreplace"))), size, group))
    if len(set(places)) > 1:
        raise Crossed
    return list(lengths)


def pairs(own: tuple[int, int], size: int, group: Any) -> list[tuple[int, int]]:
    """Return two int64 of each of `size` ranks; the second identifies the collective in which a rank is (collective).

    Every message of `gather` and `broadcast` begins with such a pair, so that ranks in different ones detect it.
    """
    everyones = [torch.empty(2, dtype=torch.int64, device="cpu") for _ in range(size)]
    dist.all_gather(everyones, torch.tensor(own, dtype=torch.int64, device="cpu"), group=group)
    return [tuple(theirs.tolist()) for theirs in everyones]


def _as_tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def to_store(value: Any) -> str:
    """Return the text for `value` in the job's store. Local. Raises WorldError if JSON cannot hold it."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise WorldError(
            f"{value!r:.60} cannot be sent through the job's store ({error}): any process that reaches the store "
            "may write to it, so ranks read only JSON there. Give numbers, text, and lists or mappings of them."
        ) from error


def from_store(found: bytes, key: str, is_expected: Callable[[Any], bool] = lambda value: True) -> Any:
    """Return the value of `found`, which the job's store holds under `key`. Local. Raises WorldError if no rank can
    have written it."""
    try:
        value = json.loads(found)
        if is_expected(value):
            return value
        raise ValueError("not a value that ranks write")
    except (ValueError, RecursionError) as error:
        raise WorldError(
            f"the job's store holds {found[:40]!r} under {key}, which no rank of this ddpshim wrote; ranks would "
            "continue with different values. Install the same ddpshim everywhere, and check which processes can "
            "reach MASTER_PORT."
        ) from error
