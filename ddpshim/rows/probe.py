"""Shows whether samples are functions of their index, by a forked child that fetches three and ends.

The child keeps nothing: its memory is thrown away, places in open files are put back, sockets are dead in it, and it
cannot write files. What cannot be probed so depends on more, as far as anyone knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import math
import multiprocessing
import os
import random
import signal
import stat
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch
from torch.utils import data as torch_data

from ddpshim.process.job import current, derive_seed
from ddpshim.process.random_streams import changed, global_states, seed_globals
from ddpshim.rows.samples import fetcher
from ddpshim.rows.tensor import Counts

DRAWS = "it uses random numbers"
_DEADLINE_S = 5
_NUM_COMPARED = 4  # samples, over ranks
_MOST_SHARED = 1 << 30  # bytes that a child copies, to put them back
_RELATIVE = 1e-3  # difference of a sum, where other processors or decoders round otherwise
_MOST_LEVELS = 4
_WRITING = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.system"}
_WRITING |= {"os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "sqlite3.connect"}


class Found(NamedTuple):
    """What a probe has found."""

    why: str  # samples may depend on more than their index; empty: they are functions of it
    samples: tuple[tuple[str, list[float]], ...] = ()  # the first ones that are: index, and sums of what they hold
    is_shared: bool = False  # it holds what processes tell each other by
    num_samples: int = -1  # of the dataset; -1: it has no length, or is a stream
    draws: tuple[str, ...] = ()  # the global generators that samples draw from, as `global_states` names them


def probed(loader: Any, join: Callable[[Any], Any] = list) -> Found:
    """Probe the dataset of a torch loader, as its first data worker would fetch from it. Local.

    `join`: what makes of fetched samples something whose parts are known.
    """
    tensors: list[torch.Tensor] = []
    if kind := _shared(loader.dataset, _MOST_LEVELS, set(), tensors):
        return Found(f"it holds a {kind} of multiprocessing, by which processes tell each other", is_shared=True)
    if sum(x.nbytes for x in tensors) > _MOST_SHARED:
        return Found("it holds tensors in shared memory", is_shared=True)
    return _by_child(loader, join, tensors)._replace(is_shared=bool(tensors))


def _by_child(loader: Any, join: Callable[[Any], Any], tensors: list[torch.Tensor]) -> Found:
    if not hasattr(os, "fork"):
        return Found("this system has no fork")
    # The offset of each open regular file: a child moves it for its parent too.
    places = {file: os.lseek(file, 0, os.SEEK_CUR) for file, mode in _open_files() if stat.S_ISREG(mode)}
    pythons = random.getstate()
    parents, childs = multiprocessing.Pipe(duplex=False)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which the child does not use
        child = os.fork()
    if child == 0:
        random.setstate(pythons)  # Python seeds it anew after a fork: a sampler that shuffles by it would differ
        try:
            childs.send(_in_child(loader, join, tensors, childs.fileno()))
        finally:
            os._exit(0)
    childs.close()
    try:
        if parents.poll(_DEADLINE_S):
            found: Found = parents.recv()
            return found
        os.kill(child, signal.SIGKILL)
    except EOFError:  # it has ended without an answer
        pass
    finally:
        parents.close()
        os.waitpid(child, 0)
        for file, place in places.items():
            with contextlib.suppress(OSError):
                os.lseek(file, place, os.SEEK_SET)
    return Found("a probe of it did not end")


def _open_files() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(256)):
        with contextlib.suppress(OSError):
            yield int(name), os.fstat(int(name)).st_mode


def _in_child(loader: Any, join: Callable[[Any], Any], tensors: list[torch.Tensor], answer: int) -> Found:
    before = [x.clone() for x in tensors]
    current().part(Counts).is_fetching = True
    try:
        _isolate(answer)
        if loader.num_workers:
            _become_first_worker(loader)
        found = _compared(loader, join)
    except _Writes as error:
        found = Found(f"it writes for a sample ({error})")
    except BaseException as error:
        found = Found(f"a probe of it ends with {type(error).__name__}: {error}"[:200])
    for tensor, old in zip(tensors, before):
        if not torch.equal(tensor, old):
            tensor.copy_(old)
            found = Found("it writes into memory that processes share")
    return found


def _isolate(answer: int) -> None:
    """Make this process one that changes nothing outside of its memory."""
    import fcntl
    import resource

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for file in range(3):
        os.dup2(null, file)
    for file, mode in [*_open_files()]:
        writes = stat.S_ISREG(mode) and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if (stat.S_ISSOCK(mode) or writes or stat.S_ISFIFO(mode)) and file != answer:
            os.dup2(null, file)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.addaudithook(_refuse_writing)
    torch.save = _save  # it opens a file in C
    torch.set_num_threads(1)


class _Writes(PermissionError):
    """Raised where a sample would change a file, or start a process."""


def _refuse_writing(event: str, given: tuple[Any, ...]) -> None:
    opens = event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and given[0] != os.devnull
    if opens or event in _WRITING or event.startswith("shutil."):
        raise _Writes(event)


def _save(*_: Any, **__: Any) -> None:
    raise _Writes("torch.save")


def _become_first_worker(loader: Any) -> None:
    seed = torch.default_generator.initial_seed() & 0xFFFFFFFF
    seed_globals(seed)
    torchs = torch_data._utils.worker
    info = torchs.WorkerInfo(id=0, num_workers=loader.num_workers, seed=seed, dataset=loader.dataset)
    torchs._worker_info = info
    if loader.worker_init_fn is not None:
        loader.worker_init_fn(0)


def _compared(loader: Any, join: Callable[[Any], Any]) -> Found:
    own = loader.batch_sampler
    batches = ([index] for index in loader.sampler) if own is None else own  # which may have no length
    indices = [*itertools.islice(itertools.chain.from_iterable(batches), _NUM_COMPARED)]
    if not indices:
        return Found("it is empty")
    draws = set[str]()

    def joined(samples: Any) -> Any:
        # In a worker torch's collate joins in shared memory, which is a file.
        worker, info = torch_data._utils.worker, torch_data.get_worker_info()
        worker._worker_info = None
        out, worker._worker_info = join(samples), info
        return out

    torchs = fetcher(loader.dataset, True, joined, False)

    def fetched(index: Any) -> tuple[bytes, list[float]]:
        seed_globals(derive_seed(0, "probe", repr(index)))
        before = global_states()
        sample = torchs.fetch([index])
        draws.update(changed(before, global_states()))
        return facts_of(sample)

    first, *others = map(fetched, indices)
    if fetched(indices[0])[0] != first[0]:
        return Found("a sample depends on more than its index")
    samples = tuple((repr(index), sums) for index, (_, sums) in zip(indices, [first, *others]))
    return Found(DRAWS if draws else "", samples, draws=tuple(draws))


def facts_of(sample: Any) -> tuple[bytes, list[float]]:
    """Return a hash of all bits of a sample, and the sum of each part of it. Raises TypeError for what is unknown."""
    bits, sums = hashlib.blake2b(digest_size=16), list[float]()

    def note(kind: str, data: bytes, total: float) -> None:
        bits.update(f"{kind}/{len(data)}/".encode() + data)
        sums.append(total)

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous()
            total = float(flat.to(torch.float64).sum()) if flat.dtype != torch.bool else float(flat.sum())
            data = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
            note(f"{flat.dtype}{tuple(flat.shape)}", data, total)
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            data = value.tobytes()
            if value.dtype.hasobject:
                raise TypeError("an array of objects")
            total = float(value.astype("float64").sum()) if value.dtype.kind in "biuf" else float(zlib.crc32(data))
            note(f"{value.dtype}{value.shape}", data, total)
        elif isinstance(value, (str, bytes)):
            data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            note(type(value).__name__, data, float(zlib.crc32(data)))
        elif value is None or isinstance(value, (bool, int, float)):
            note(type(value).__name__, repr(value).encode(), 0.0 if value is None else float(value))
        elif isinstance(value, Mapping):
            note("mapping", b"", len(value))
            for key, inner in value.items():
                walk(key)
                walk(inner)
        elif isinstance(value, (list, tuple)):
            note("sequence", b"", len(value))
            for inner in value:
                walk(inner)
        else:
            raise TypeError(f"a sample holds {type(value).__name__}")

    walk(sample)
    return bits.digest(), sums


def first_difference(one: Found, other: Found) -> str:
    """Return the first sample in which two ranks differ, if both could be probed; empty if there is none. Local."""
    if one.num_samples != other.num_samples:
        return f"{one.num_samples} samples here and {other.num_samples} there"
    for (index, sums), (index_of_other, sums_of_other) in zip(one.samples, other.samples):
        if index != index_of_other:
            return f"the first batch has index {index} here and {index_of_other} there"
        if not are_near(sums, sums_of_other):
            return f"sample {index} is another"
    return ""


def are_near(sums: Sequence[float], of_other: Sequence[float]) -> bool:
    """Whether two samples' sums, as `Found` has them, are those of one sample."""

    def is_near(one: float, other: float) -> bool:
        both = math.isnan(one) and math.isnan(other)
        return both or math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_RELATIVE)

    return len(sums) == len(of_other) and all(map(is_near, sums, of_other))


def _shared(value: Any, num_levels: int, seen: set[int], tensors: list[torch.Tensor]) -> str:
    """Return the kind of the first object, in what a dataset holds, by which processes tell each other. Local.

    `tensors` gets those in shared memory.
    """
    if id(value) in seen or not num_levels:
        return ""
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.is_shared():
            tensors.append(value)
        return ""
    modules = {kind.__module__ for kind in type(value).__mro__}
    if type(value).__module__.startswith("multiprocessing.") or ("_ctypes" in modules and hasattr(value, "_wrapper")):
        return type(value).__name__
    if isinstance(value, (list, tuple)):
        part = slice(64)  # not by a program's own __getitem__
        inner = list.__getitem__(value, part) if isinstance(value, list) else tuple.__getitem__(value, part)
    else:
        inner = _held(value)
    return next(filter(None, (_shared(one, num_levels - 1, seen, tensors) for one in inner)), "")


def _held(value: Any) -> list[Any]:
    """Return what an object holds: its attributes, and what its class's and its own functions refer to."""
    function: Any = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is not None:
        with contextlib.suppress(ValueError):  # an empty cell
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            return [*cells, *(function.__globals__[name] for name in code.co_names if name in function.__globals__)]
        return []
    if isinstance(value, (type, torch.nn.Module)) or type(value) is type(sys):
        return []
    inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    fetches: list[Callable[..., Any]] = [
        vars(kind)[name]
        for kind in type(value).__mro__
        for name in ("__getitem__", "__getitems__")
        if name in vars(kind)
    ]
    return [*fetches, *(list(inner.values())[:256] if isinstance(inner, dict) else ())]
