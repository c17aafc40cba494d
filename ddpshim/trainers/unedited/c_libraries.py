"""Redirects files that libraries open without Python (h5py, lmdb, videos) to where this rank reads or writes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import FrameType
from typing import Any, Callable
from urllib.parse import parse_qs, quote, unquote, urlsplit

from ddpshim.process.after_import import after_import
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say_on_main
from ddpshim.process.users_line import is_users, users_line
from ddpshim.trainers.unedited.holders import in_place

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


class CLibraries:
    """Redirects paths: `reads(path)` and `writes(path, keeps, is_new)` return the path to use. Local.

    On the main rank they return `path` itself. `reports`: whether to report commands that every rank starts.
    """

    def __init__(self, reads: Callable[[Any], Any], writes: Callable[..., Any], reports: bool = True) -> None:
        self._reads, self._writes, self._reports = reads, writes, reports
        self._undo = contextlib.ExitStack()

    def install(self) -> Callable[[], None]:
        """Redirect libraries that are imported now or later; return a function that undoes it."""
        made: list[tuple[str, str, Callable[[Any], Any]]] = []
        for places, redirect in ((_READING, self._reads), (_WRITING, self._writes)):
            for module, name, position, keyword in places:
                made.append((module, name, functools.partial(_redirected, redirect, position, keyword)))
        for name, creates in (("h5f.open", False), ("h5f.create", True)):
            made.append(("h5py", name, functools.partial(self._h5, creates=creates)))
        made += [("lmdb", "open", self._lmdb_open), ("av", "open", self._av_open)]
        made += [("sqlite3.dbapi2", "connect", self._sqlite_connect), ("subprocess", "Popen.__init__", self._popen)]
        held: dict[int, Any] = {}  # functions that other modules may already have imported
        for module, name, make in made:
            real = getattr(sys.modules.get(module), name, None)
            if real is not None:
                held[id(real)] = make(real)
            else:
                self._undo.callback(after_import(module, functools.partial(self._replace, module, name, make)))
        self._undo.enter_context(in_place(held))
        return self._undo.close

    def _replace(self, module: str, name: str, make: Callable[[Any], Any]) -> None:
        *inner, last = name.split(".")
        owner = sys.modules[module]
        for part in inner:
            owner = getattr(owner, part, None)  # type: ignore[assignment]
        if hasattr(owner, last):
            self._undo.enter_context(replaced(owner, last, make(getattr(owner, last))))

    def _h5(self, real: Callable[..., Any], creates: bool) -> Callable[..., Any]:
        def stand_in(name: Any, flags: int = 2 if creates else 1, *args: Any, **kwargs: Any) -> Any:
            if creates:
                place = self._writes(name, is_new=not flags & _HDF5_MADE_NEW)
            else:
                place = self._writes(name, keeps=True) if flags & _HDF5_WRITES else self._reads(name)
            return real(os.fsencode(place), flags, *args, **kwargs)

        return stand_in

    def _lmdb_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("readonly", False):
                return real(str(self._writes(path, keeps=True)), *args, **kwargs)
            if not os.path.isdir(path):
                return real(str(self._reads(path)), *args, **kwargs)
            data = self._reads(os.path.join(os.fspath(path), "data.mdb"))
            return real(os.path.dirname(data), *args, **kwargs)

        return stand_in

    def _av_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(file: Any, mode: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, (str, os.PathLike)):
                file = str((self._reads if mode in (None, "r") else self._writes)(file))
            return real(file, mode, *args, **kwargs)

        return stand_in

    def _sqlite_connect(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(database: Any, *args: Any, **kwargs: Any) -> Any:
            is_address = os.fsdecode(database).startswith("file:") and (kwargs.get("uri") or any(args[6:7]))
            file, is_read = sqlite_file(database) if is_address else (os.fsdecode(database), False)
            if file not in ("", ":memory:"):
                place = self._reads(file) if is_read else self._writes(file, keeps=True)
                for end in () if is_read else ("-journal", "-wal", "-shm"):  # may have what the file has not yet
                    self._writes(file + end, keeps=True)
                database = f"file:{quote(place)}?{urlsplit(os.fsdecode(database)).query}" if is_address else place
            return real(database, *args, **kwargs)

        return stand_in

    def _popen(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Redirect ffmpeg's output, which is how videos are written, and for all programs files this rank has made."""

        def stand_in(process: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
            if isinstance(args, (list, tuple)) and args:
                redirected = [self._argument(part) for part in args]
                if os.path.basename(os.fsdecode(args[0])).startswith("ffmpeg") and _is_a_file_name(args[-1]):
                    redirected[-1] = self._writes(args[-1])
                elif self._reports:
                    _report_popen(args[0], sys._getframe(1))
                args = redirected
            elif self._reports:
                _report_popen(args, sys._getframe(1))
            if kwargs.get("cwd") is not None:
                kwargs["cwd"] = self._reads(kwargs["cwd"])
            real(process, args, *more, **kwargs)

        return stand_in

    def _argument(self, part: Any) -> Any:
        is_a_path = isinstance(part, os.PathLike) or (isinstance(part, str) and not part.startswith("-"))
        return self._reads(part) if is_a_path and part and os.path.exists(part) else part


def sqlite_file(database: Any) -> tuple[str, bool]:
    """Return the file of a name or an address ("file:a.db?mode=ro"), "" for one in memory; whether it is only read."""
    name = os.fsdecode(database)
    address = urlsplit(name)
    if address.scheme != "file":
        return ("" if name == ":memory:" else name), False
    mode = parse_qs(address.query).get("mode", [""])[-1]
    path = unquote(address.path)
    return ("" if mode == "memory" or path == ":memory:" else path), mode == "ro"


def _report_popen(command: Any, frame: FrameType) -> None:
    """Report that every rank runs this command, if a line of the program starts it without waiting."""
    if is_users(frame.f_code.co_filename):
        say_on_main(
            f"{users_line(frame)}: every rank starts {command!r} by subprocess.Popen, so all of them write its files. "
            "With subprocess.run, which waits for the command, only the main rank runs it"
        )


def _redirected(
    redirect: Callable[[Any], Any], position: int, keyword: str, real: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(real, updated=())
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if keyword in kwargs:
            kwargs[keyword] = _place(redirect, kwargs[keyword])
        elif len(args) > position:
            args = (*args[:position], _place(redirect, args[position]), *args[position + 1 :])
        return real(*args, **kwargs)

    return stand_in


def _place(redirect: Callable[[Any], Any], path: Any) -> Any:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return path  # the number of a camera, or an open file
    place = redirect(path)
    return os.fsencode(place) if isinstance(path, bytes) else str(place)


def _is_a_file_name(part: Any) -> bool:
    return isinstance(part, os.PathLike) or (isinstance(part, str) and ":" not in part and not part.startswith("-"))
