"""Replaces `open`, and os's functions that take paths, on ranks that are not main."""

from __future__ import annotations

import _io
import errno
import functools
import os
import posix
import stat
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType, MethodType
from typing import Any, Callable, Optional, TypeVar

from ddpshim import variables
from ddpshim.errors import SyncError
from ddpshim.process.users_line import users_line
from ddpshim.trainers.unedited.file_calls import CLibraries, LeftAlone, may_write
from ddpshim.trainers.unedited.file_overlay import View, copy_file

T = TypeVar("T")

_READING = ("stat", "lstat", "access", "statvfs", "listxattr", "getxattr", "pathconf")
_CHANGING = ("truncate", "chmod", "chown", "lchown", "utime", "setxattr", "removexattr")
_OF_LINKS = ("lstat", "readlink", "lchown", "mkdir", "unlink", "remove", "rmdir")  # never follow the last part
_DELETED = " (deleted)"  # Linux appends this in /proc to the path of a removed file


class Files:
    """Python's file functions for a `View`, with the names and arguments of os."""

    def __init__(self, view: View, left: LeftAlone) -> None:
        self._view, self._left = view, left

    def stand_ins(self) -> dict[int, Any]:
        """Return the stand-ins by the id of the function that each replaces."""
        own = ("listdir", "scandir", "chdir", "getcwd", "getcwdb", "open", "symlink", "link", "rename")
        made = {**{name: getattr(self, name) for name in own}, "replace": self.rename}
        for names, act, is_written in (
            ((*_READING, "readlink"), self._read, False),
            ((*_CHANGING, "mkdir"), self._change, True),
            (("unlink", "remove", "rmdir"), self._remove, True),
        ):
            made |= {name: self._stand_in(name, act, is_written) for name in names if hasattr(posix, name)}
        return {**{id(getattr(posix, name)): made[name] for name in made}, id(_io.open): self.open_file}

    def place_to_read(self, path: Any) -> Any:
        """Return the path that a library should read instead of `path`. For libraries that open files in C."""
        found = self._path(path)
        return path if found is None else self._view.place_with_content(self._view.find(found))

    def place_to_write(self, path: Any, keeps: bool = False, is_new: bool = False) -> Any:
        """Return the path that a library should write to; `keeps`: the file starts with its earlier content."""
        found = self._path(path, is_written=True)
        if found is None:
            return path
        found = self._view.find(found)
        if keeps:
            self._view.place_with_content(found)  # raises if it is not known, and so cannot be kept
        return self._view.place_to_write(found, keeps, is_new)

    def libraries(self) -> CLibraries:
        """Return what redirects files that libraries open in C."""
        return CLibraries(self.place_to_read, self.place_to_write)

    def refuse(self, path: str, event: str, frame: FrameType, source: str) -> None:
        """Raise SyncError if the caller in `frame` writes to a path that other ranks see, past these stand-ins."""
        path = os.path.normpath(path)
        # A function of Python that opens the file is asked itself; `path` may be a folder that only this rank has.
        opener = frame.f_locals["opener"] if frame.f_code is Files.open_file.__code__ else None
        is_asked = isinstance(getattr(opener, "func", opener), (FunctionType, MethodType))
        is_private = path.startswith(self._view.top) or self._left.has(path) or self._left.is_asked_by(frame)
        if not (is_asked or is_private):
            raise SyncError(
                f"{users_line()} writes to {path} ({event}) through a function that ddpshim cannot intercept, on a "
                "rank that is not main; all ranks would write there and corrupt the file. Use open or sqlite3.connect, "
                f"or call os functions as os.NAME (os.mkdir), or write only if os.environ['{variables.RANK}'] is '0'."
            )

    # Reading

    def _stand_in(self, name: str, act: Callable[..., Any], is_written: bool) -> Callable[..., Any]:
        """Return the stand-in for a function that takes a path; `act`: what it does with a path of the view."""
        real = getattr(posix, name)

        def stand_in(path: Any = ".", *args: Any, dir_fd: Optional[int] = None, **kwargs: Any) -> Any:
            found = self._path(path, dir_fd, is_written)
            if found is None:
                return real(path, *args, **({} if dir_fd is None else {"dir_fd": dir_fd}), **kwargs)
            follows = name not in _OF_LINKS and kwargs.get("follow_symlinks", True)
            answer = self._do(lambda: act(real, found, follows, *args, **kwargs), path)
            return os.fsencode(answer) if isinstance(answer, str) and isinstance(path, bytes) else answer

        return stand_in

    def _read(self, real: Callable[..., Any], path: str, follows: bool, *args: Any, **kwargs: Any) -> Any:
        return real(self._view.locate(path, follows)[1], *args, **kwargs)

    def _change(self, real: Callable[..., Any], path: str, follows: bool, *args: Any, **kwargs: Any) -> Any:
        is_new = real is posix.mkdir
        return real(self._view.place_to_write(self._view.find(path, follows), not is_new, is_new), *args, **kwargs)

    def _remove(self, real: Callable[..., Any], path: str, follows: bool) -> None:
        self._view.remove(self._view.find(path, follows), is_folder=real is posix.rmdir)

    def listdir(self, path: Any = None) -> list[Any]:
        path = "." if path is None else path
        found = self._folder(path)
        if found is None:
            return posix.listdir(path)

        def names() -> list[str]:
            folder, place = self._view.locate(found)
            return self._view.names(folder) if _is_folder(place) else posix.listdir(place)

        made = self._do(names, path)
        return [os.fsencode(name) for name in made] if isinstance(path, bytes) else made

    def scandir(self, path: Any = None) -> Any:
        path = "." if path is None else path
        found = self._folder(path)
        if found is None:
            return posix.scandir(path)

        def listing() -> Any:
            folder, place = self._view.locate(found)
            if not _is_folder(place):
                return posix.scandir(place)
            if isinstance(path, int):  # entries show only their name, but need a path for stat
                return Listing(Entry(name, os.path.join(found, name), name) for name in self._view.names(folder))
            if place == folder and self._view.folder == posix.getcwd():
                with posix.scandir(path) as entries:  # before `has_own`, which then knows what main has removed by now
                    listed = [*entries]
                if not self._view.has_own(folder):
                    return Listing(listed)
            given = os.fspath(path)
            encoded = os.fsencode if isinstance(given, bytes) else str
            names = [encoded(name) for name in self._view.names(folder)]
            return Listing(Entry(name, os.path.join(given, name)) for name in names)

        return self._do(listing, path)

    def getcwd(self) -> str:
        return self._view.folder

    def getcwdb(self) -> bytes:
        return os.fsencode(self._view.folder)

    def chdir(self, path: Any) -> None:
        found = self._path(path)
        if found is None:
            posix.chdir(path)
            self._view.folder = posix.getcwd()
            return

        def change() -> None:
            folder, place = self._view.locate(found)
            posix.chdir(place)
            self._view.folder = folder

        self._do(change, path)

    # Writing

    def open_file(self, file: Any, mode: str = "r", *args: Any, opener: Any = None, **kwargs: Any) -> Any:
        """open"""
        if opener is None or getattr(opener, "__module__", None) == "pathlib":  # Python 3.9: it calls os.open
            opener = functools.partial(self.open, mode=0o666)
        kwargs["opener"] = opener
        return _io.open(file, mode, *args, **kwargs)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Optional[int] = None) -> int:
        writes = may_write(flags)
        found = self._path(path, dir_fd, is_written=writes)
        if found is None:
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        follows = not flags & os.O_NOFOLLOW

        def opened() -> int:
            if not writes:
                return posix.open(self._view.place_with_content(self._view.locate(found, follows)[0]), flags, mode)
            is_new = flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT | os.O_EXCL
            is_kept = not flags & os.O_TRUNC or not flags & os.O_CREAT
            if flags & os.O_RDWR and is_kept:
                self._view.place_with_content(self._view.find(found, follows))  # raises if it is not known
            return posix.open(self._view.place_to_write(self._view.find(found, follows), is_kept, is_new), flags, mode)

        return self._do(opened, path)

    def rename(self, src: Any, dst: Any, *, src_dir_fd: Optional[int] = None, dst_dir_fd: Optional[int] = None) -> None:
        """os.rename, os.replace"""
        source = self._path(src, src_dir_fd, is_written=True)
        to = self._path(dst, dst_dir_fd, is_written=True)
        if source is None and to is None:
            posix.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        if source is not None and to is not None:
            self._move(src, dst, source, to, follows=False)
            return

        # Between this rank's files and those that are not redirected: these may be on different file systems.
        def copy() -> None:
            place = src if source is None else self._view.place_with_content(self._view.find(source, follows=False))
            if not stat.S_ISREG(posix.lstat(place).st_mode):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), src, None, dst)
            copy_file(place, dst if to is None else self._view.place_to_write(self._view.find(to), keeps=False))

        self._do(copy, src, dst)
        if source is None:
            posix.unlink(src, dir_fd=src_dir_fd)
        else:
            self._view.remove(self._view.find(source, follows=False), is_folder=False)

    def link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        source, to = self._path(src, is_written=True), self._path(dst, is_written=True)
        if source is None or to is None:
            posix.link(src, dst, **kwargs)
            return
        self._move(src, dst, source, to, kwargs.get("follow_symlinks", True), keeps_source=True)

    def _move(self, src: Any, dst: Any, source: str, to: str, follows: bool, keeps_source: bool = False) -> None:
        view = self._view
        self._do(lambda: view.move(view.find(source, follows), view.find(to, False), keeps_source), src, dst)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: Optional[int] = None) -> None:
        found = self._path(dst, dir_fd, is_written=True)
        if found is None:
            posix.symlink(src, dst, dir_fd=dir_fd)
            return
        self._do(lambda: self._view.link_to(os.fsdecode(src), self._view.find(found, follows=False)), src, dst)

    def _folder(self, path: Any) -> Optional[str]:
        """`_path`, also for the descriptor of an open folder."""
        return self._path(_path_of(path) if isinstance(path, int) else path)

    def _path(self, path: Any, dir_fd: Optional[int] = None, is_written: bool = False) -> Optional[str]:
        """Return `path` as an absolute path; None if the view does not handle it."""
        if isinstance(path, int):
            return None
        path = os.fsdecode(path)  # accepts a Path too
        if not path:
            return None  # the real function raises its error
        if dir_fd is not None and not os.path.isabs(path):
            path = os.path.join(_path_of(dir_fd), path)
        path = os.path.normpath(os.path.join(self._view.folder, path))
        if is_written:
            frame = sys._getframe(2)
            if self._left.takes_note(path, frame) or self._left.is_asked_by(frame):
                return None
        return None if self._left.has(path) else path

    def _do(self, call: Callable[[], T], path: Any, to: Any = None) -> T:
        """Return the result of `call`, which may be called twice; errors name the path that the program gave."""
        try:
            try:
                return call()
            except FileNotFoundError:
                if not self._view.catch_up():
                    raise
                return call()  # the main rank has just removed the file, and this rank knows that now
        except OSError as error:
            if error.filename is not None:
                error.filename, error.filename2 = path, to
            raise


def _path_of(descriptor: int) -> str:
    """Return the path of an open file or folder, also if the main rank has removed it since."""
    path = posix.readlink(f"/proc/self/fd/{descriptor}")
    return path[: -len(_DELETED)] if path.endswith(_DELETED) and not posix.fstat(descriptor).st_nlink else path


class Entry:
    """Stands in for os.DirEntry."""

    def __init__(self, name: Any, place: Any, path: Any = None) -> None:
        """`place`: the path for stat; `path`: the path to show, if different."""
        self.name, self.path, self._place = name, place if path is None else path, place

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._place, follow_symlinks=follow_symlinks)

    def _has(self, kind: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._has(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._has(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._has(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class Listing(Iterator[Any]):
    """Stands in for the iterator that os.scandir returns."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *error: Any) -> None:
        self._entries = iter(())

    close = __exit__


def _is_folder(place: str) -> bool:
    return stat.S_ISDIR(posix.stat(place).st_mode)
