"""Converts values to JSON and tensors, and back, for progress files and messages between ranks.

Nothing in them can run code, except objects that only pickle can hold: these are pickled, unless the option
`trust_peers` is off. A pickle, in which torch and Python write objects, can make its reader call anything.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import pickle
import sys
import warnings
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from packaging.version import Version

from ddpshim.errors import WorldError

_NOT_ALLOWED = (
    "with trust_peers=no ranks do not unpickle data from other ranks. Send numbers, text, tensors, arrays, and "
    "lists or mappings of them, or leave trust_peers out if only ranks can reach each other's ports"
)
if Version(torch.__version__).release < (2, 2):
    # torch.load(weights_only=True) then warns about its own code: each rank would print that, and one process not.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)


class NotPlain(TypeError):
    """A value, or a part of one, is an object that only pickle can hold."""


class Broken(ValueError):
    """The data were not written by `take_apart`."""


# Name: (type, function that returns its parts, function that rebuilds it). Parts are simpler, so `_take` ends.
_KINDS: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "tuple": (tuple, list, lambda *items: tuple(items)),
    "deque": (deque, lambda value: [value.maxlen, *value], lambda maxlen, *items: deque(items, maxlen)),
    "set": (set, list, lambda *items: set(items)),
    "frozenset": (frozenset, list, lambda *items: frozenset(items)),
    "complex": (complex, lambda value: [value.real, value.imag], complex),
    "fraction": (Fraction, lambda value: [value.numerator, value.denominator], Fraction),
    "int": (int, lambda value: [hex(value)], lambda text: int(text, 16)),  # a long one, see `_take`
    "path": (type(Path()), lambda value: [str(value)], Path),
    "size": (torch.Size, list, lambda *items: torch.Size(items)),
    "device": (torch.device, lambda value: [str(value)], torch.device),
    "dtype": (torch.dtype, lambda value: [str(value).rpartition(".")[2]], lambda name: _checked_dtype(name)),
}
_NAMES = {kind: name for name, (kind, _, _) in _KINDS.items()}
# An OrderedDict keeps its attributes: a module's state dict has versions there.
_MAPPINGS: dict[str, type] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_LENGTH = 8  # bytes that hold the length of the JSON in a message
_AS_THEY_ARE = (type(None), bool, float, str)
_LONGEST_INT = 1 << 4096  # JSON writes longer ones slowly, and Python refuses to read them


def take_apart(value: Any, pickled: Optional[Callable[[Any], bytes]] = None) -> tuple[str, list[torch.Tensor]]:
    """Return `value` as JSON, and the tensors in it. Local; tensors are not copied.

    Args:
        pickled: returns the bytes of an object that is neither. Default: raises NotPlain, with the object's place.
    """
    tensors: list[torch.Tensor] = []
    try:
        return json.dumps(_take(value, tensors, pickled, "")), tensors
    except RecursionError:
        raise NotPlain("a value contains itself, or is nested too deeply") from None


def put_together(outline: str, tensors: list[torch.Tensor], unpickled: Optional[Callable[[bytes], Any]] = None) -> Any:
    """Return the value that `take_apart` converted. Local.

    Args:
        unpickled: returns an object from its bytes. Default: raises NotPlain if there are any.

    Raises Broken if they do not come from `take_apart`.
    """
    try:
        return _put(json.loads(outline), tensors, unpickled)
    except NotPlain:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, ImportError) as error:
        raise Broken(f"{type(error).__name__}: {str(error)[:160]}") from error


def dumps(value: Any, pickled: Optional[Callable[[Any], bytes]] = None) -> bytes:
    """Return `value` as a message, for `loads`. Local. `pickled` and errors: see `take_apart`."""
    outline, tensors = take_apart(value, pickled)
    head, rest = outline.encode(), io.BytesIO()
    if tensors:
        torch.save(tensors, rest)
    return b"".join((len(head).to_bytes(_LENGTH, "little"), head, rest.getbuffer()))


def loads(message: bytes, unpickled: Optional[Callable[[bytes], Any]] = None) -> Any:
    """Return the value that `dumps` converted to `message`. Local. `unpickled` and errors: see `put_together`."""
    end = _LENGTH + int.from_bytes(message[:_LENGTH], "little")
    try:
        outline = message[_LENGTH:end].decode()
        tensors = torch.load(io.BytesIO(message[end:]), weights_only=True) if message[end:] else []
    except Exception as error:  # torch may raise anything for foreign bytes
        raise Broken(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}") from error
    return put_together(outline, tensors, unpickled)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the content of a vector of bytes. Local; raises ValueError for any other tensor."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.device.type != "cpu":
        raise ValueError(f"not bytes, but a tensor of {tensor.dtype} on {tensor.device}")
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())  # as fast as numpy, without it


def _take(value: Any, tensors: list[torch.Tensor], pickled: Optional[Callable[[Any], bytes]], where: str) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is int and -_LONGEST_INT < value < _LONGEST_INT):
        return value
    if kind is list:
        return [
            item if type(item) in _AS_THEY_ARE else _take(item, tensors, pickled, f"{where}[{i}]")
            for i, item in enumerate(value)
        ]
    if kind in _MAPPINGS.values():
        about = [_take(vars(value), tensors, pickled, where)] if kind is OrderedDict else []
        pairs = [
            [_take(key, tensors, pickled, f"a key of {where}"), _take(item, tensors, pickled, f"{where}[{key!r:.60}]")]
            for key, item in value.items()
        ]
        return {kind.__name__: [*about, *pairs]}
    if kind in _NAMES:
        name = _NAMES[kind]
        held = enumerate(_KINDS[name][1](value))
        return {name: [_take(item, tensors, pickled, f"{where}[{i}]") for i, item in held]}
    if kind in (torch.Tensor, torch.nn.Parameter):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if kind in (bytes, bytearray):
        tensors.append(_tensor_of(value))
        return {kind.__name__: len(tensors) - 1}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(value)
        if kind in (numpy.ndarray, array.dtype.type) and not array.dtype.hasobject and array.dtype.names is None:
            tensors.append(_tensor_of(array.tobytes()))
            return {"numpy": [array.dtype.str, list(array.shape), len(tensors) - 1, kind is not numpy.ndarray]}
    if pickled is None:
        raise NotPlain(f"{where or 'it'} is a {kind.__module__}.{kind.__qualname__}")
    tensors.append(_tensor_of(pickled(value)))
    return {"pickled": len(tensors) - 1}


def _put(outline: Any, tensors: list[torch.Tensor], unpickled: Optional[Callable[[bytes], Any]]) -> Any:
    if type(outline) in (*_AS_THEY_ARE, int):
        return outline
    if type(outline) is list:
        return [item if type(item) in _AS_THEY_ARE else _put(item, tensors, unpickled) for item in outline]
    ((name, held),) = outline.items()
    if name in _MAPPINGS:
        has_attributes = name == "OrderedDict"
        pairs = held[has_attributes:]
        made = _MAPPINGS[name]({_put(key, tensors, unpickled): _put(item, tensors, unpickled) for key, item in pairs})
        if has_attributes:
            vars(made).update(_put(held[0], tensors, unpickled))
        return made
    if name in _KINDS:
        return _KINDS[name][2](*(_put(item, tensors, unpickled) for item in held))
    if name == "tensor":
        return tensors[held]
    if name in ("bytes", "bytearray"):
        content = bytes_of(tensors[held])
        return content if name == "bytes" else bytearray(content)
    if name == "numpy":
        dtype, shape, number, is_scalar = held
        numpy = importlib.import_module("numpy")
        array = numpy.frombuffer(bytearray(bytes_of(tensors[number])), numpy.dtype(dtype)).reshape(shape)
        return array[()] if is_scalar else array
    if name == "pickled":
        if unpickled is None:
            raise NotPlain("it contains objects that only pickle can read")
        return unpickled(bytes_of(tensors[held]))
    raise ValueError(f"no such kind: {name!r:.60}")


def _tensor_of(content: Any) -> torch.Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _checked_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype: {name!r:.60}")
    return found


def packed(value: Any, trusts_peers: bool) -> bytes:
    """Return the message for `value`. Local.

    Raises WorldError if it needs pickle and peers are not trusted, and pickle's own errors.
    """
    try:
        return dumps(value, pickle.dumps if trusts_peers else None)
    except NotPlain as error:
        raise WorldError(f"a value cannot be sent to other ranks ({error}): {_NOT_ALLOWED}.") from None


def unpacked(message: bytes, trusts_peers: bool, sender: int) -> Any:
    """Return the value of `message`. Local. Raises WorldError for a pickle if peers are not trusted, and for junk."""
    try:
        return loads(message, pickle.loads if trusts_peers else None)
    except NotPlain:
        raise WorldError(f"rank {sender} sent an object: {_NOT_ALLOWED}.") from None
    except Broken as error:
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
    messages = (bytes_of(message[:length]) for message, length in zip(everyones, lengths))
    return [unpacked(message, trusts_peers, sender) for sender, message in enumerate(messages)]


def broadcast(value: Any, src: int, rank: int, size: int, group: Any, trusts_peers: bool, what: str) -> Any:
    """Return the value of rank `src`, on every rank of `group` (collective). Raises Crossed; see `gather`."""
    own = _as_tensor(packed(value, trusts_peers)) if rank == src else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = _lengths(own.numel(), size, group, what)[src]
    message = own if rank == src else torch.empty(length, dtype=torch.uint8, device="cpu")
    dist.broadcast(message, src, group=group)
    return value if rank == src else unpacked(bytes_of(message), trusts_peers, src)


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
    everyones = torch.empty((size, 2), dtype=torch.int64, device="cpu")
    mine = torch.tensor(own, dtype=torch.int64, device="cpu")
    begin_gather([*everyones.unbind()], mine, group).wait()
    return [tuple(theirs) for theirs in everyones.tolist()]


def begin_gather(everyones: list[torch.Tensor], own: torch.Tensor, group: Any) -> Any:
    """Begin to gather `own`, and return the work (collective). It is `dist.all_gather` without its checks, which take
    as long.

    `own` and all `everyones` are contiguous, and of one shape, type and device.
    """
    if own.is_complex():
        everyones, own = [torch.view_as_real(x) for x in everyones], torch.view_as_real(own)
    ranks: Any = group or dist.group.WORLD
    return ranks.allgather([everyones], [own])


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
