"""Converts values to bytes and tensors, and back, for progress files and messages between ranks.

The bytes are a pickle. A pickle can make its reader call anything: where the reader does not trust the writer, it
rebuilds only the classes of `_SAFE`, as `torch.load(weights_only=True)` does, and the writer refuses any other object.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import pickle
import sys
import warnings
from collections import Counter, OrderedDict, deque
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

_LENGTH = 8  # bytes that hold the length of the pickle in a message


class NotPlain(TypeError):
    """A value, or a part of one, is an object of a class that is not safe to rebuild."""


def take_apart(value: Any, trusted: bool = False) -> tuple[bytes, list[torch.Tensor]]:
    """Return `value` as a pickle, and the tensors in it, which are not copied. Local.

    Raises NotPlain, with its place, for an object of another class than `_SAFE`, unless `trusted`.
    """
    file, tensors = io.BytesIO(), list[torch.Tensor]()
    try:
        _Writer(file, tensors, trusted).dump(value)
    except NotPlain as error:
        raise NotPlain(f"{_place(value) or 'it'} is a {error}") from None
    except RecursionError:
        raise NotPlain("a value is nested too deeply") from None
    return file.getvalue(), tensors


def put_together(outline: bytes, tensors: list[torch.Tensor], trusted: bool = False) -> Any:
    """Return the value that `take_apart` converted. Local.

    Raises NotPlain if it contains other objects, unless `trusted`, and any error if it does not come from `take_apart`.
    """
    return _Reader(io.BytesIO(outline), tensors, trusted).load()


def packed(value: Any, trusts_peers: bool = False) -> bytes:
    """Return the message for `value` to other ranks. Local.

    Raises WorldError if it holds other objects than `_SAFE` and peers are not trusted, and pickle's own errors.
    """
    try:
        (outline, tensors), rest = take_apart(value, trusts_peers), io.BytesIO()
    except NotPlain as error:
        raise WorldError(f"a value cannot be sent to other ranks ({error}): {_NOT_ALLOWED}.") from None
    if tensors:
        torch.save(tensors, rest)
    return b"".join((len(outline).to_bytes(_LENGTH, "little"), outline, rest.getbuffer()))


def unpacked(message: bytes, sender: int, trusts_peers: bool = False) -> Any:
    """Return the value of `message`. Local. Raises WorldError for objects if peers are not trusted, and for junk."""
    end = _LENGTH + int.from_bytes(message[:_LENGTH], "little")
    try:
        tensors = torch.load(io.BytesIO(message[end:]), weights_only=True) if message[end:] else []
        return put_together(message[_LENGTH:end], tensors, trusts_peers)
    except NotPlain:
        raise WorldError(f"rank {sender} sent an object: {_NOT_ALLOWED}.") from None
    except Exception as error:  # pickle and torch may raise anything for foreign bytes
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        raise WorldError(
            f"rank {sender} sent bytes that are not a message of ddpshim ({said}); ranks would continue with "
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


def _array(dtype: str, shape: list[int], content: torch.Tensor, is_scalar: bool) -> Any:
    numpy = importlib.import_module("numpy")
    array = numpy.frombuffer(bytearray(bytes_of(content)), numpy.dtype(dtype)).reshape(shape)
    return array[()] if is_scalar else array


# By name, besides what pickle writes without one: numbers, text, bytes, lists, tuples, dictionaries and sets.
_SAFE: dict[str, Any] = {
    f"{made.__module__}.{made.__qualname__}": made
    for made in (complex, Fraction, Counter, OrderedDict, deque, type(Path()), torch.Size, torch.device, _array)
}
_SAFE.update({str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)})


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], trusted: bool) -> None:
        super().__init__(file, protocol=5)
        self._tensors, self._trusted = tensors, trusted

    def persistent_id(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1

    def reducer_override(self, value: Any) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            array = numpy.asarray(value)
            is_plain = type(value) in (numpy.ndarray, array.dtype.type)
            if is_plain and not array.dtype.hasobject and array.dtype.names is None:
                return _array, (array.dtype.str, array.shape, tensor_of(array.tobytes()), array is not value)
        kind = type(value)
        if self._trusted or any(safe is value or safe is kind for safe in _SAFE.values()):
            return NotImplemented
        raise NotPlain(f"{kind.__module__}.{kind.__qualname__}")


def _place(value: Any) -> str:
    """Return where in `value` the first object is that is not safe, as "['a'][1]". Local."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, part in parts:
        try:
            _Writer(io.BytesIO(), [], False).dump(part)
        except NotPlain:
            return f"[{key!r:.60}]{_place(part)}"
    return ""


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], trusted: bool) -> None:
        super().__init__(file)
        self._tensors, self._trusted = tensors, trusted

    def persistent_load(self, number: Any) -> Any:
        return self._tensors[number]

    def find_class(self, module: str, name: str) -> Any:
        if self._trusted:
            return super().find_class(module, name)
        if (known := f"{module}.{name}") not in _SAFE:
            raise NotPlain(f"it holds a {known}")
        return _SAFE[known]
