"""Converts values to JSON and tensors, and back, for progress files and messages between ranks.

Nothing in them can run code, except objects that only pickle can hold: these are pickled where the reader trusts the
writer. A pickle, in which torch and Python write objects, can make its reader call anything.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import pickle
import sys
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
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
    "bytes": (bytes, lambda value: [tensor_of(value)], lambda content: bytes_of(content)),
    "bytearray": (bytearray, lambda value: [tensor_of(value)], lambda content: bytearray(bytes_of(content))),
    "size": (torch.Size, list, lambda *items: torch.Size(items)),
    "device": (torch.device, lambda value: [str(value)], torch.device),
    "dtype": (torch.dtype, lambda value: [str(value).rpartition(".")[2]], lambda name: _dtype(name)),
}
_NAMES = {kind: name for name, (kind, _, _) in _KINDS.items()}
# An OrderedDict keeps its attributes: a module's state dict has versions there.
_MAPPINGS: dict[str, type] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_LENGTH = 8  # bytes that hold the length of the JSON in a message
_AS_THEY_ARE = (type(None), bool, float, str)
_LONGEST_INT = 1 << 4096  # JSON writes longer ones slowly, and Python refuses to read them


def take_apart(value: Any, trusted: bool = False) -> tuple[str, list[torch.Tensor]]:
    """Return `value` as JSON, and the tensors in it. Local; tensors are not copied.

    Raises NotPlain, with its place, for an object that only pickle can hold, unless `trusted`.
    """
    tensors: list[torch.Tensor] = []
    try:
        return json.dumps(_take(value, tensors, trusted, "")), tensors
    except RecursionError:
        raise NotPlain("a value contains itself, or is nested too deeply") from None


def put_together(outline: str, tensors: list[torch.Tensor], trusted: bool = False) -> Any:
    """Return the value that `take_apart` converted. Local.

    Raises NotPlain if it contains a pickle, unless `trusted`, and Broken if it does not come from `take_apart`.
    """
    try:
        return _put(json.loads(outline), tensors, trusted)
    except NotPlain:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, ImportError) as error:
        raise Broken(f"{type(error).__name__}: {str(error)[:160]}") from error


def dumps(value: Any, trusted: bool = False) -> bytes:
    """Return `value` as a message, for `loads`. Local. Raises what `take_apart` raises."""
    outline, tensors = take_apart(value, trusted)
    head, rest = outline.encode(), io.BytesIO()
    if tensors:
        torch.save(tensors, rest)
    return b"".join((len(head).to_bytes(_LENGTH, "little"), head, rest.getbuffer()))


def loads(message: bytes, trusted: bool = False) -> Any:
    """Return the value that `dumps` converted to `message`. Local. Raises what `put_together` raises."""
    end = _LENGTH + int.from_bytes(message[:_LENGTH], "little")
    try:
        outline = message[_LENGTH:end].decode()
        tensors = torch.load(io.BytesIO(message[end:]), weights_only=True) if message[end:] else []
    except Exception as error:  # torch may raise anything for foreign bytes
        raise Broken(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}") from error
    return put_together(outline, tensors, trusted)


def packed(value: Any, trusts_peers: bool = False) -> bytes:
    """Return the message for `value` to other ranks. Local.

    Raises WorldError if it needs pickle and peers are not trusted, and pickle's own errors.
    """
    try:
        return dumps(value, trusts_peers)
    except NotPlain as error:
        raise WorldError(f"a value cannot be sent to other ranks ({error}): {_NOT_ALLOWED}.") from None


def unpacked(message: bytes, sender: int, trusts_peers: bool = False) -> Any:
    """Return the value of `message`. Local. Raises WorldError for a pickle if peers are not trusted, and for junk."""
    try:
        return loads(message, trusts_peers)
    except NotPlain:
        raise WorldError(f"rank {sender} sent an object: {_NOT_ALLOWED}.") from None
    except Broken as error:
        raise WorldError(
            f"rank {sender} sent bytes that are not a message of ddpshim ({error}); ranks would continue with "
            "different values. Install the same ddpshim everywhere, and check whether another process can reach the "
            "ranks' ports, MASTER_PORT among them."
        ) from error


def key(name: str) -> str:
    """Return `name` as valid UTF-8, which a store requires: names of files can hold any bytes. Local."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def tensor_of(content: Any) -> torch.Tensor:
    """Return bytes as a vector, for `bytes_of`. Local; copies them."""
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the content of a vector of bytes. Local; raises ValueError for any other tensor."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.device.type != "cpu":
        raise ValueError(f"not bytes, but a tensor of {tensor.dtype} on {tensor.device}")
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())  # as fast as numpy, without it


def _take(value: Any, tensors: list[torch.Tensor], trusted: bool, where: str) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is int and -_LONGEST_INT < value < _LONGEST_INT):
        return value
    if kind in (torch.Tensor, torch.nn.Parameter):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if kind in _MAPPINGS.values():
        about = [_take(vars(value), tensors, trusted, where)] if kind is OrderedDict else []
        pairs = [
            [_take(key, tensors, trusted, f"a key of {where}"), _take(item, tensors, trusted, f"{where}[{key!r:.60}]")]
            for key, item in value.items()
        ]
        return {kind.__name__: [*about, *pairs]}
    if kind is list:
        name, parts = "list", value
    elif kind in _NAMES:
        name = _NAMES[kind]
        parts = _KINDS[name][1](value)
    elif (array := _plain_array(value)) is not None:
        name, parts = "numpy", [array.dtype.str, list(array.shape), tensor_of(array.tobytes()), array is not value]
    elif trusted:
        name, parts = "pickled", [tensor_of(pickle.dumps(value))]
    else:
        raise NotPlain(f"{where or 'it'} is a {kind.__module__}.{kind.__qualname__}")
    taken = [
        part if type(part) in _AS_THEY_ARE else _take(part, tensors, trusted, f"{where}[{i}]")
        for i, part in enumerate(parts)
    ]
    return taken if kind is list else {name: taken}


def _put(outline: Any, tensors: list[torch.Tensor], trusted: bool) -> Any:
    if type(outline) in (*_AS_THEY_ARE, int):
        return outline
    if type(outline) is list:
        return [part if type(part) in _AS_THEY_ARE else _put(part, tensors, trusted) for part in outline]
    ((name, held),) = outline.items()
    if name == "tensor":
        return tensors[held]
    parts = _put(held, tensors, trusted)
    if name in _MAPPINGS:
        has_attributes = name == "OrderedDict"
        made = _MAPPINGS[name](dict(parts[has_attributes:]))
        if has_attributes:
            vars(made).update(parts[0])
        return made
    if name == "numpy":
        return _array(*parts)
    if name == "pickled":
        if not trusted:
            raise NotPlain("it contains objects that only pickle can read")
        return pickle.loads(bytes_of(*parts))
    return _KINDS[name][2](*parts)


def _plain_array(value: Any) -> Any:
    """Return `value` as an array, if it is one of numpy's arrays or scalars without objects; else None."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    array = numpy.asarray(value)
    is_plain = type(value) in (numpy.ndarray, array.dtype.type)
    return array if is_plain and not array.dtype.hasobject and array.dtype.names is None else None


def _array(dtype: str, shape: list[int], content: torch.Tensor, is_scalar: bool) -> Any:
    numpy = importlib.import_module("numpy")
    array = numpy.frombuffer(bytearray(bytes_of(content)), numpy.dtype(dtype)).reshape(shape)
    return array[()] if is_scalar else array


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype: {name!r:.60}")
    return found
