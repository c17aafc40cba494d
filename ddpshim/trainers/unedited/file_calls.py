"""Finds the calls of a program that touch files: Python's functions wherever they are held, audit events, libraries.

Libraries that open files without Python (h5py, lmdb, videos) are redirected to where this rank reads or writes. Files
that do not belong to a trainer are left alone: devices, caches, temporary files, files of libraries.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import posix
import stat
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from types import FrameType, FunctionType
from typing import Any, Callable, Optional
from urllib.parse import parse_qs, quote, unquote, urlsplit

from ddpshim import variables
from ddpshim.process.job import current
from ddpshim.process.replaced import after_import, noted, replaced
from ddpshim.process.say import say_on_main
from ddpshim.process.users_line import is_users, users_line

# The import system, ddpshim and private modules keep the real functions.
_KEEP_REAL = ("posix", "importlib", "zipimport", "ddpshim")
_KEEP_IN_CLASSES = ("pathlib", "glob", "tempfile")  # hold functions as class attributes or default arguments
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
TEMPORARY = getattr(os, "O_TMPFILE", 0)
_DELETED = " (deleted)"  # Linux appends this in /proc to the path of a removed file
# Audit events of Python that write: for each path, its argument, and the one with the descriptor of its folder.
_WRITTEN: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("open", "os.truncate", "sqlite3.connect"), ((0, -1),)),
    **{"os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),)},
    **{"os.rename": ((0, 2), (1, 3)), "os.link": ((1, 3),), "os.symlink": ((1, 2),)},
}
_HDF5_WRITES, _HDF5_MADE_NEW = 1 | 2 | 4, 2  # h5f.ACC_RDWR, ACC_TRUNC, ACC_EXCL
# Functions that read, and functions that write a new file: (module, name in it, position and keyword of the path).
_READING = (
    *(("cv2", "imread", 0, "filename"), ("cv2", "VideoCapture", 0, "filename")),
    *(("safetensors", "safe_open", 0, "filename"), ("h5py", "h5f.is_hdf5", 0, "name"), ("torch.jit", "load", 0, "f")),
    *(("pyarrow", "memory_map", 0, "path"), ("pyarrow", "input_stream", 0, "source")),
    *(("pyarrow.parquet", "ParquetFile.__init__", 1, "source"), ("imageio_ffmpeg", "read_frames", 0, "path")),
)
_WRITING = (
    *(("cv2", "imwrite", 0, "filename"), ("cv2", "VideoWriter", 0, "filename")),
    *(("safetensors", "serialize_file", 1, "filename"), ("torch.jit", "save", 1, "f")),
    *(("pyarrow.parquet", "ParquetWriter.__init__", 1, "where"), ("imageio_ffmpeg", "write_frames", 0, "path")),
    ("torch.profiler", "profile.export_chrome_trace", 1, "path"),
)


@contextlib.contextmanager
def in_place(stand_ins: dict[int, Any], *keep: str) -> Iterator[None]:
    """Within this block, modules hold each function's stand-in in its place; `stand_ins` is keyed by its id. Local.

    `keep`: packages that keep the real functions.
    """
    with contextlib.ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            package = name.partition(".")[0]
            is_private = package.startswith("_") and package != "__main__"
            if module is None or is_private or package in (*_KEEP_REAL, *keep):
                continue
            held = list(getattr(module, "__dict__", {}).items())
            for attribute, value in held:
                if id(value) in stand_ins:
                    undo.enter_context(replaced(module, attribute, stand_ins[id(value)]))
            for _, value in held if package in _KEEP_IN_CLASSES else ():
                if isinstance(value, type) and value.__module__ == name:
                    _replace_in(value, stand_ins, undo)
        yield


def _replace_in(kind: type, stand_ins: dict[int, Any], undo: contextlib.ExitStack) -> None:
    for attribute, value in list(vars(kind).items()):
        value = getattr(value, "__func__", value)
        if id(value) in stand_ins:
            undo.enter_context(replaced(kind, attribute, staticmethod(stand_ins[id(value)])))
        elif isinstance(value, FunctionType) and value.__defaults__:
            undo.callback(setattr, value, "__defaults__", value.__defaults__)
            value.__defaults__ = tuple(stand_ins.get(id(default), default) for default in value.__defaults__)


See = Callable[[str, str, FrameType, str], None]
_seeing: list[See] = []


@contextlib.contextmanager
def watched(see: See) -> Iterator[None]:
    """Within this block, call `see` before Python writes a file. Local.

    It gets the path, the audit event ("kept": a library changes the file in place), the caller's frame, and of a
    move's new path also the old one, else "".
    """
    _listen()
    _seeing.append(see)
    try:
        yield
    finally:
        _seeing.remove(see)


@functools.cache
def _listen() -> None:
    sys.addaudithook(_on_event)  # cannot be removed, so it is added once per process


def _on_event(event: str, args: Any) -> None:
    if _seeing and event in _WRITTEN:  # most events are others
        source = ""
        for path in _written_by(event, args):
            for see in _seeing:
                see(path, event, sys._getframe(1), source)
            source = path


def may_write(flags: int) -> bool:
    """Whether `os.open` with these flags may change a file that has a name."""
    return bool(flags & WRITES) and not (TEMPORARY and flags & TEMPORARY == TEMPORARY)


def _written_by(event: str, args: Any) -> Iterator[str]:
    """Yield the absolute paths that an audit event announces to write: of files, folders, or where nothing is."""
    if event == "open" and not (isinstance(args[2], int) and may_write(args[2])):
        return
    if event == "sqlite3.connect":
        file, is_read = sqlite_file(args[0])
        args = (None if is_read or not file else file,)
    for at, folder in _WRITTEN[event]:
        if isinstance(args[at], (str, bytes, os.PathLike)):
            path, descriptor = os.fsdecode(args[at]), -1 if folder < 0 else args[folder]
            if not os.path.isabs(path):
                path = os.path.join(posix.getcwd() if descriptor < 0 else path_of(descriptor), path)
            if not is_special(path):
                yield path


def path_of(descriptor: int) -> str:
    """Return the path of an open file or folder, also if it was removed since. Raises OSError if it is closed."""
    path = posix.readlink(f"/proc/self/fd/{descriptor}")
    return path[: -len(_DELETED)] if path.endswith(_DELETED) and not posix.fstat(descriptor).st_nlink else path


def is_special(path: str) -> bool:
    """Whether it is a pipe, a socket or a device."""
    try:
        mode = posix.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


class CLibraries:
    """Redirects paths: `reads(path)` and `writes(path, keeps, is_new)` return the path to use. Local."""

    def __init__(self, reads: Callable[[Any], Any], writes: Callable[..., Any], *more: Any) -> None:
        self._reads, self._writes, self._writing = reads, writes, (*_WRITING, *more)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within this block, redirect libraries, also those that are imported in it."""
        instead: list[tuple[str, str, Callable[..., Any]]] = [
            *(("h5py", "h5f.open", functools.partial(self._h5, False)), ("lmdb", "open", self._lmdb_open)),
            *(("h5py", "h5f.create", functools.partial(self._h5, True)), ("av", "open", self._av_open)),
            *(("sqlite3.dbapi2", "connect", self._sqlite_connect), ("subprocess", "Popen.__init__", self._popen)),
        ]
        for places, redirect in ((_READING, self._reads), (self._writing, self._writes)):
            for module, name, position, keyword in places:
                instead.append((module, name, functools.partial(_redirected, redirect, position, keyword)))
        with contextlib.ExitStack() as undo:

            def replace(module: str, name: str, call: Callable[..., Any]) -> None:
                *inner, last = name.split(".")
                owner: Any = sys.modules[module]
                for part in inner:
                    owner = getattr(owner, part, None)
                if hasattr(owner, last):
                    undo.enter_context(replaced(owner, last, _calling(call, getattr(owner, last))))

            with noted() as held:  # other modules may already have imported these functions
                for module, name, call in instead:
                    undo.callback(after_import(module, functools.partial(replace, module, name, call)))
            undo.enter_context(in_place(held))
            yield

    def _h5(self, creates: bool, real: Any, name: Any, flags: Optional[int] = None, *args: Any, **kwargs: Any) -> Any:
        flags = (2 if creates else 1) if flags is None else flags
        if creates:
            place = self._writes(name, is_new=not flags & _HDF5_MADE_NEW)
        else:
            place = self._writes(name, keeps=True) if flags & _HDF5_WRITES else self._reads(name)
        return real(os.fsencode(place), flags, *args, **kwargs)

    def _lmdb_open(self, real: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("readonly", False):
            return real(str(self._writes(path, keeps=True)), *args, **kwargs)
        if not os.path.isdir(path):
            return real(str(self._reads(path)), *args, **kwargs)
        data = self._reads(os.path.join(os.fspath(path), "data.mdb"))
        return real(os.path.dirname(data), *args, **kwargs)

    def _av_open(self, real: Any, file: Any, mode: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            file = str((self._reads if mode in (None, "r") else self._writes)(file))
        return real(file, mode, *args, **kwargs)

    def _sqlite_connect(self, real: Any, database: Any, *args: Any, **kwargs: Any) -> Any:
        is_address = os.fsdecode(database).startswith("file:") and (kwargs.get("uri") or any(args[6:7]))
        file, is_read = sqlite_file(database) if is_address else (os.fsdecode(database), False)
        if file not in ("", ":memory:"):
            place = self._reads(file) if is_read else self._writes(file, keeps=True)
            for end in () if is_read else ("-journal", "-wal", "-shm"):  # may have what the file has not yet
                self._writes(file + end, keeps=True)
            database = f"file:{quote(place)}?{urlsplit(os.fsdecode(database)).query}" if is_address else place
        return real(database, *args, **kwargs)

    def _popen(self, real: Any, process: Any, args: Any, *more: Any, **kwargs: Any) -> None:
        """Redirect ffmpeg's output, which is how videos are written, and for all programs files this rank has made."""
        command, last = args, None
        if isinstance(args, (list, tuple)) and args:
            command, last, args = args[0], args[-1], [self._argument(part) for part in args]
        is_text = isinstance(last, str) and ":" not in last and not last.startswith("-")
        is_file = is_text or isinstance(last, os.PathLike)
        if is_file and os.path.basename(os.fsdecode(command)).startswith("ffmpeg"):
            args[-1] = self._writes(last)
        elif current().world is not None and is_users(sys._getframe(2).f_code.co_filename):
            say_on_main(
                f"{users_line()}: every rank starts {command!r} by subprocess.Popen, so all of them write its files. "
                "With subprocess.run, which waits for the command, only the main rank runs it"
            )
        if kwargs.get("cwd") is not None:
            kwargs["cwd"] = self._reads(kwargs["cwd"])
        real(process, args, *more, **kwargs)

    def _argument(self, part: Any) -> Any:
        is_a_path = isinstance(part, os.PathLike) or (isinstance(part, str) and not part.startswith("-"))
        return self._reads(part) if is_a_path and part and os.path.exists(part) else part


def seen_by(see: See, *more: Any) -> CLibraries:
    """Return what calls `see` before a library in C, or a function of `more`, writes a file, and redirects nothing."""

    def writes(path: Any, keeps: bool = False, is_new: bool = False) -> Any:
        see(os.path.abspath(os.fsdecode(path)), "kept" if keeps else "open", sys._getframe(1), "")
        return path

    return CLibraries(lambda path: path, writes, *more)


def sqlite_file(database: Any) -> tuple[str, bool]:
    """Return the file of a name or an address ("file:a.db?mode=ro"), "" for one in memory; whether it is only read."""
    name = os.fsdecode(database)
    address = urlsplit(name)
    if address.scheme != "file":
        return ("" if name == ":memory:" else name), False
    mode = parse_qs(address.query).get("mode", [""])[-1]
    path = unquote(address.path)
    return ("" if mode == "memory" or path == ":memory:" else path), mode == "ro"


def _calling(call: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls `call` with `real` before its own arguments; it is a method in a class only if `real` is."""
    if not isinstance(real, FunctionType):
        return functools.partial(call, real)
    return functools.wraps(real)(lambda *args, **kwargs: call(real, *args, **kwargs))


def _redirected(redirect: Any, position: int, keyword: str, real: Any, /, *args: Any, **kwargs: Any) -> Any:
    if keyword in kwargs:
        kwargs[keyword] = _place(redirect, kwargs[keyword])
    elif len(args) > position:
        args = (*args[:position], _place(redirect, args[position]), *args[position + 1 :])
    return real(*args, **kwargs)


def _place(redirect: Callable[[Any], Any], path: Any) -> Any:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return path  # the number of a camera, or an open file
    place = redirect(path)
    return os.fsencode(place) if isinstance(path, bytes) else str(place)


PRIVATE = "ddpshim-files-"  # the name of a rank's private folder begins with it
# Files that these write are never redirected: they have one per process, or are safe with several processes.
_LIBRARIES = (
    *("ddpshim", "multiprocessing", "importlib", "triton", "numba", "torch._inductor", "torch._dynamo"),
    "torch.distributed.elastic",  # the error of a rank, for torchrun's summary
)
# These write on behalf of their callers.
_PASS_ON = ("pathlib", "os", "posixpath", "genericpath", "shutil", "io", "codecs", "gzip", "tempfile", "contextlib")
_OURS_THAT_PASS_ON = __name__.rpartition(".")[0]
_VARIABLES = (
    *("XDG_CACHE_HOME", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME"),
    *("TORCH_EXTENSIONS_DIR", "HF_HOME", "CUDA_CACHE_PATH", variables.RUN_DIR),
)


class LeftAlone:
    """The places and callers whose files are not redirected."""

    def __init__(self) -> None:
        self._temporary = os.path.realpath(tempfile.gettempdir())
        self._made: set[str] = set()  # by the module tempfile, so the names are unique to this process
        folders = ["/dev", "/proc", "/sys", *map(os.path.expanduser, ("~/.cache", "~/.config", "~/.triton", "~/.nv"))]
        folders += [sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")]
        folders += [os.environ[name] for name in _VARIABLES if os.path.isabs(os.environ.get(name, ""))]
        prefixes = {f"{form}/" for folder in folders for form in (folder, os.path.realpath(folder))}
        self._prefixes = (*prefixes, os.path.join(self._temporary, "torchinductor_"))

    def has(self, path: str) -> bool:
        """Whether `path` (absolute) is in one of the places."""
        if f"{path}/".startswith(self._prefixes):
            return f"/{PRIVATE}" not in path  # which may be in RUN_DIR
        is_temporary = bool(self._made) and path.startswith(f"{self._temporary}/")
        return is_temporary and path[: (path + "/").index("/", len(self._temporary) + 1)] in self._made

    def takes_note(self, path: str, frame: FrameType) -> bool:
        """Record `path` and return True if it is a new temporary file: `frame`, which makes it, is in `tempfile`."""
        folder, name = os.path.split(path)
        if frame.f_globals.get("__name__") != "tempfile" or os.path.realpath(folder) != self._temporary:
            return False
        self._made.add(os.path.join(self._temporary, name))
        return True

    def is_asked_by(self, frame: Optional[FrameType]) -> bool:
        """Whether a library writes for its own purposes: it calls `frame`, directly or through `_PASS_ON`."""
        while frame is not None:
            name = str(frame.f_globals.get("__name__"))
            if not (name.startswith(_OURS_THAT_PASS_ON) or name.partition(".")[0] in _PASS_ON):
                return f"{name}.".startswith(tuple(f"{library}." for library in _LIBRARIES))
            frame = frame.f_back
        return False


class Locks:
    """Knows whether this rank holds the lock of a file that all ranks share, such as that of a library's cache. Local.

    Ranks get such a lock one after the other, and the first does the work for all. While it does, it must not wait for
    the main rank, which may wait for the lock; and what it asks, the others never ask.
    """

    def __init__(self) -> None:
        self._places, self._held = LeftAlone(), dict[int, str]()  # the file of each locked descriptor

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which `fcntl.flock` and `fcntl.lockf` note what the main thread locks."""
        return in_place({id(real): functools.partial(self._lock, real) for real in (fcntl.flock, fcntl.lockf)})

    def held(self) -> str:
        """Return a file that the main thread, which asks, has locked; "" if there is none."""
        if not self._held or threading.current_thread() is not threading.main_thread():
            return ""
        for number, file in self._held.items():
            with contextlib.suppress(OSError):  # it is closed
                if path_of(number) == file:
                    return file
        return ""

    def _lock(self, real: Callable[..., Any], fd: Any, operation: int, *rest: Any) -> Any:
        answer = real(fd, operation, *rest)
        number = fd if isinstance(fd, int) else fd.fileno()
        file = path_of(number)
        if operation & fcntl.LOCK_UN:
            self._held.pop(number, None)
        elif threading.current_thread() is threading.main_thread() and self._places.has(file):
            self._held[number] = file
        return answer
