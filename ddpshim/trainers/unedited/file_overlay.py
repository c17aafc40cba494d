"""Stand-ins for `open` and os's functions that take paths, on ranks that are not main, and the files that they show.

A `View` is one rank's own changes, on top of the files that existed when the job began. Its paths are absolute and
contain no folder that is a link; `View.find` returns such paths. A file that a rank has made is at the same path below
the rank's private folder, `View.top`; for one that the main rank saves, an empty file stands there.
"""

from __future__ import annotations

import _io
import contextlib
import errno
import functools
import os
import posix
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType, MethodType
from typing import Any, Callable, Optional, TypeVar

from ddpshim.errors import SyncError
from ddpshim.process.users_line import users_line
from ddpshim.trainers.unedited.file_calls import PRIVATE, LeftAlone, is_special, may_write, path_of
from ddpshim.trainers.unedited.main_file_log import Before, MainsChanges, MainsSaves, state_of
from ddpshim.variables import RANK, RUN_DIR

T = TypeVar("T")

_READING = ("stat", "lstat", "access", "statvfs", "listxattr", "getxattr", "pathconf")
_CHANGING = ("truncate", "chmod", "chown", "lchown", "utime", "setxattr", "removexattr")
_OF_LINKS = ("lstat", "readlink", "lchown", "mkdir", "unlink", "remove", "rmdir")  # never follow the last part
_MOST_LINKS = 40
_MOST_FOLDERS = 10_000  # folders whose path without links is cached


class Files:
    """Python's file functions for a `View`, with the names and arguments of os."""

    def __init__(self, view: View, left: LeftAlone) -> None:
        self.view, self._left = view, left

    def stand_ins(self) -> dict[int, Any]:
        """Return the stand-ins by the id of the function that each replaces."""
        own = ("listdir", "scandir", "chdir", "getcwd", "getcwdb", "open", "symlink", "link", "rename")
        made = {**{name: getattr(self, name) for name in own}, "replace": self.rename}
        for names, act, is_written in (
            ((*_READING, "readlink"), self._read, False),
            ((*_CHANGING, "mkdir"), self._change, True),
            (("unlink", "remove", "rmdir"), self._remove, True),
        ):
            for real in (getattr(posix, name) for name in names if hasattr(posix, name)):
                made[real.__name__] = functools.partial(self._at_path, real, act, is_written)
        return {**{id(getattr(posix, name)): made[name] for name in made}, id(_io.open): self.open_file}

    def place_to_read(self, path: Any) -> Any:
        """Return the path that a library should read instead of `path`. For libraries that open files in C."""
        found = self._path(path)
        return path if found is None else self.view.place_with_content(self.view.find(found))

    def place_to_write(self, path: Any, keeps: bool = False, is_new: bool = False) -> Any:
        """Return the path that a library should write to; `keeps`: the file starts with its earlier content."""
        found = self._path(path, is_written=True)
        if found is None:
            return path
        found = self.view.find(found)
        if keeps:
            self.view.place_with_content(found)  # raises if it is not known, and so cannot be kept
        return self.view.place_to_write(found, keeps, is_new)

    def refuse(self, path: str, event: str, frame: FrameType, source: str) -> None:
        """Raise SyncError if the caller in `frame` writes to a path that other ranks see, past these stand-ins."""
        path = os.path.normpath(path)
        # A function of Python that opens the file is asked itself; `path` may be a folder that only this rank has.
        opener = frame.f_locals["opener"] if frame.f_code is Files.open_file.__code__ else None
        is_asked = isinstance(getattr(opener, "func", opener), (FunctionType, MethodType))
        is_private = path.startswith(self.view.top) or self._left.has(path) or self._left.is_asked_by(frame)
        if not (is_asked or is_private):
            raise SyncError(
                f"{users_line()} writes to {path} ({event}) through a function that ddpshim cannot intercept, on a "
                "rank that is not main; all ranks would write there and corrupt the file. Use open or sqlite3.connect, "
                f"or call os functions as os.NAME (os.mkdir), or write only if os.environ['{RANK}'] is '0'."
            )

    # Reading

    def _at_path(
        self, real: Any, act: Any, is_written: bool, /, path: Any = ".", *args: Any, dir_fd: Any = None, **kwargs: Any
    ) -> Any:
        """Stands in for a function that takes a path; `act`: what it does with a path of the view."""
        found = self._path(path, dir_fd, is_written)
        if found is None:
            return real(path, *args, **({} if dir_fd is None else {"dir_fd": dir_fd}), **kwargs)
        follows = real.__name__ not in _OF_LINKS and kwargs.get("follow_symlinks", True)
        answer = self._do(lambda: act(real, self.view.find(found, follows), *args, **kwargs), path)
        return os.fsencode(answer) if isinstance(answer, str) and isinstance(path, bytes) else answer

    def _read(self, real: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        return real(self.view.place(path), *args, **kwargs)

    def _change(self, real: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        is_new = real is posix.mkdir
        return real(self.view.place_to_write(path, not is_new, is_new), *args, **kwargs)

    def _remove(self, real: Callable[..., Any], path: str) -> None:
        self.view.remove(path, is_folder=real is posix.rmdir)

    def listdir(self, path: Any = None) -> list[Any]:
        with self.scandir(path) as entries:
            return [entry.name for entry in entries]

    def scandir(self, path: Any = None) -> Any:
        path = "." if path is None else path
        # The descriptor of an open folder has a path, too.
        found = self._path(path_of(path) if isinstance(path, int) else path)
        if found is None:
            return posix.scandir(path)

        def listing() -> Any:
            folder = self.view.find(found)
            place = self.view.place(folder)
            if not _is_folder(place):
                return posix.scandir(place)
            names = self.view.names(folder)
            if place == folder and _leads_to(path, folder) and not _is_folder(self.view.top + folder):
                with posix.scandir(path) as entries:
                    listed = [*entries]
                if [os.fsdecode(entry.name) for entry in listed] == names:  # this rank sees the folder as it is on disk
                    return Listing(listed)
            given = "" if isinstance(path, int) else os.fspath(path)  # entries of an open folder show only their name
            encoded = os.fsencode if isinstance(given, bytes) else str
            return Listing(Entry(encoded(name), given, os.path.join(found, name)) for name in names)

        return self._do(listing, path)

    def getcwd(self) -> str:
        return self.view.folder

    def getcwdb(self) -> bytes:
        return os.fsencode(self.view.folder)

    def chdir(self, path: Any) -> None:
        found = self._path(path)

        def change() -> None:
            folder = None if found is None else self.view.find(found)
            posix.chdir(path if folder is None else self.view.place(folder))
            self.view.folder = folder or posix.getcwd()

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

        def opened() -> int:
            seen = self.view.find(found, follows=not flags & os.O_NOFOLLOW)
            if not writes:
                return posix.open(self.view.place_with_content(seen), flags, mode)
            is_new = flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT | os.O_EXCL
            is_kept = not flags & os.O_TRUNC or not flags & os.O_CREAT
            if flags & os.O_RDWR and is_kept:
                self.view.place_with_content(seen)  # raises if it is not known
            return posix.open(self.view.place_to_write(seen, is_kept, is_new), flags, mode)

        return self._do(opened, path)

    def rename(self, src: Any, dst: Any, *, src_dir_fd: Optional[int] = None, dst_dir_fd: Optional[int] = None) -> None:
        """os.rename, os.replace"""
        source = self._path(src, src_dir_fd, is_written=True)
        to = self._path(dst, dst_dir_fd, is_written=True)
        if source is None and to is None:
            posix.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        view = self.view
        if source is not None and to is not None:
            self._do(lambda: view.move(view.find(source, follows=False), view.find(to, follows=False)), src, dst)
            return

        # Between this rank's files and those that are not redirected: these may be on different file systems.
        def copy() -> None:
            place = src if source is None else view.place_with_content(view.find(source, follows=False))
            if not stat.S_ISREG(posix.lstat(place).st_mode):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), src, None, dst)
            copy_file(place, dst if to is None else view.place_to_write(view.find(to), keeps=False))

        self._do(copy, src, dst)
        if source is None:
            posix.unlink(src, dir_fd=src_dir_fd)
        else:
            view.remove(view.find(source, follows=False), is_folder=False)

    def link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        source = self._path(src, kwargs.get("src_dir_fd"), is_written=True)
        to = self._path(dst, kwargs.get("dst_dir_fd"), is_written=True)
        if source is None or to is None:
            posix.link(src, dst, **kwargs)
            return
        view, follows = self.view, kwargs.get("follow_symlinks", True)
        self._do(lambda: view.move(view.find(source, follows), view.find(to, False), keeps_source=True), src, dst)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: Optional[int] = None) -> None:
        found = self._path(dst, dir_fd, is_written=True)
        if found is None:
            posix.symlink(src, dst, dir_fd=dir_fd)
            return
        self._do(lambda: self.view.link_to(os.fsdecode(src), self.view.find(found, follows=False)), src, dst)

    def _path(self, path: Any, dir_fd: Optional[int] = None, is_written: bool = False) -> Optional[str]:
        """Return `path` as an absolute path; None if the view does not handle it."""
        if isinstance(path, int):
            return None
        path = os.fsdecode(path)  # accepts a Path too
        if not path:
            return None  # the real function raises its error
        if dir_fd is not None and not os.path.isabs(path):
            path = os.path.join(path_of(dir_fd), path)
        path = os.path.normpath(os.path.join(self.view.folder, path))
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
                self.view.catch_up()
                return call()  # the main rank may just have removed the file, and this rank knows that now
        except OSError as error:
            if error.filename is not None:
                error.filename, error.filename2 = path, to
            raise


class Entry:
    """Stands in for os.DirEntry."""

    def __init__(self, name: Any, folder: Any, place: str) -> None:
        """`folder`: as the program gave it; `place`: the path for stat."""
        self.name, self.path, self._place = name, os.path.join(folder, name), place

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._place, follow_symlinks=follow_symlinks)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self._place) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self._place) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self._place)

    def is_junction(self) -> bool:
        return False

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class Listing(contextlib.AbstractContextManager[Any], Iterator[Any]):
    """Stands in for the iterator that os.scandir returns."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *error: Any) -> None:
        self._entries = iter(())

    close = __exit__


class View:
    """The files as this rank sees them. Local, except that reading a file in `saves` waits for the main rank."""

    def __init__(self, changes: MainsChanges, saves: MainsSaves) -> None:
        self.top = os.path.realpath(tempfile.mkdtemp(prefix=PRIVATE, dir=os.environ.get(RUN_DIR)))
        self.folder, self._process = posix.getcwd(), os.getpid()
        self._changes, self._saves = changes, saves
        # Whether paths on disk are hidden, with everything below them: True if this rank has removed them, or they were
        # absent when the job began; False if the main rank has made them for all ranks.
        self._hidden: dict[str, bool] = {}
        self._to_be_shown: list[str] = []
        self._unknown: dict[str, Before] = {}  # files that the main rank may have changed, with content not sent
        self._folders: dict[str, str] = {}

    def remove_all(self) -> None:
        """Remove all that this rank has made; nothing in a forked child, which may run exit handlers."""
        if os.getpid() == self._process:
            shutil.rmtree(self.top, ignore_errors=True)

    # Finding paths

    def find(self, path: str, follows: bool = True) -> str:
        """Return the program's `path` as an absolute path without links; `follows`: also resolve its last part."""
        for _ in range(_MOST_LINKS):
            path = os.path.normpath(os.path.join(self.folder, path))
            if f"{path}/".startswith(f"{self.top}/"):  # a private path that the program got from an open file's name
                path = path[len(self.top) :] or "/"
            folder, name = os.path.split(path)
            path = os.path.join(self._without_links(folder), name)
            place = self._seen_at(path) if follows else ""
            if not stat.S_ISLNK(_mode(place)):
                return path
            path = os.path.join(os.path.dirname(path), posix.readlink(place))
        raise _error(errno.ELOOP, path)

    def place(self, path: str) -> str:
        """Return where to read the file at `path`; a path where nothing exists if this rank sees nothing there."""
        if path in self._saves and path not in self._unknown:
            if not self._saves.wait_for(path) or _exists(path):
                return path
            # The main rank has removed it again, as this rank will: until then its empty file stands for it, with its
            # size and time: programs remove their oldest checkpoints.
            _remove_quietly(self.top + path)  # it may be the file of a hard link, too
            self._restore(self._saves.state(path))
        return self._seen_at(path)

    def _seen_at(self, path: str) -> str:
        """Return `place(path)` without waiting: for a file in `saves`, that of the empty file that stands for it."""
        own = self.top + path
        if _exists(own):
            return own
        # The disk first: the main rank announces a file before it makes it, so the news cover every file seen here.
        is_there = _exists(path)
        self._look(path)
        return path if is_there and not _exists(own) and not self._is_hidden(path) else own

    def place_with_content(self, path: str) -> str:
        """Return the `place` of a file to be read. Raises SyncError if its earlier content is no longer known."""
        place = self.place(path)
        if not self._is_known(path) or self._saves.is_newer(path):
            raise SyncError(
                f"{path} is read on this rank after the main rank changed or removed it; ranks would read different "
                "files. Open it in an earlier training step than the one that changes it."
            )
        return place

    def place_to_write(self, path: str, keeps: bool, is_new: bool = False) -> str:
        """Return where to write the file at `path`; `keeps`: with its content; `is_new`: it must not exist yet."""
        own = self.top + path
        self._make_folder_of(path)  # first, because it may take in news
        place = self._seen_at(path)
        if is_special(place):
            return place
        if is_new and _exists(place):
            raise _error(errno.EEXIST, path)
        if keeps and self._is_known(path):
            self._copy(path, self.place(path))
        elif _is_folder(place) and place != own:
            posix.mkdir(own)
        if not _exists(place) and not self._is_hidden(path):
            self._hidden[path] = True  # the file that the main rank makes there
        self._saves.forget(path)
        if not keeps:
            self._unknown.pop(path, None)
        return own

    def names(self, folder: str) -> list[str]:
        """Return the names in an existing folder: first those on the disk in its order, then the others, sorted."""
        own, found = self.top + folder, posix.listdir(folder) if _is_folder(folder) else []
        self._look(folder)
        own_names = {*(posix.listdir(own) if _is_folder(own) else ())}
        others = self._is_hidden(folder)
        hidden = {name for name in found if self._hidden.get(os.path.join(folder, name), others)}
        shown = [name for name in found if name in own_names or name not in hidden]
        return shown + sorted(own_names.difference(found))

    # Changing files

    def leave_to_main(self, path: str) -> None:
        """Record that the main rank saves the file at `path`: an empty file replaces this rank's own."""
        _remove_quietly(self.top + path)
        self._unknown.pop(path, None)
        self._saves.note(path)
        self._make_own(os.path.dirname(path))
        posix.close(posix.open(self.top + path, os.O_WRONLY | os.O_CREAT))

    def remove(self, path: str, is_folder: bool) -> None:
        """os.rmdir, or os.unlink."""
        mode = posix.lstat(self._seen_at(path)).st_mode
        if is_folder and stat.S_ISDIR(mode) and self.names(path):
            raise _error(errno.ENOTEMPTY, path)
        if is_folder != stat.S_ISDIR(mode):
            raise _error(errno.ENOTDIR if is_folder else errno.EISDIR, path)
        if _exists(self.top + path):  # news may have been taken in since `_seen_at`
            (posix.rmdir if is_folder else posix.unlink)(self.top + path)
        self._forget(path)

    def move(self, source: str, to: str, keeps_source: bool = False) -> None:
        """os.rename, or os.link with `keeps_source`; of a file in `saves`, the empty file that stands for it."""
        info = posix.lstat(self._seen_at(source))
        if source == to and not keeps_source:
            return
        self._make_folder_of(to)
        self._check_target(source, stat.S_ISDIR(info.st_mode), to, keeps_source)
        self._make_folder_of(source)
        self._copy(source, self._seen_at(source))
        if _exists(self.top + to) and stat.S_ISDIR(info.st_mode):
            posix.rmdir(self.top + to)
        (posix.link if keeps_source else posix.replace)(self.top + source, self.top + to)
        self._unknown.pop(to, None)
        for path in [path for path in self._unknown if f"{path}/".startswith(f"{source}/")]:
            before = self._unknown[path] if keeps_source else self._unknown.pop(path)
            moved = to + path[len(source) :]
            self._unknown[moved] = before._replace(path=moved)
        self._saves.move(source, to, keeps_source)
        if not keeps_source:
            self._forget(source)
            self._hidden[to] = True  # the previous file or folder there

    def link_to(self, target: str, path: str) -> None:
        """os.symlink."""
        posix.symlink(target, self.place_to_write(path, keeps=False, is_new=True))
        self._folders.clear()

    def see_what_is_shared(self) -> None:
        """Show what the main rank has made for all ranks so far."""
        self.catch_up()
        for path in self._to_be_shown:
            self._hidden[path] = False
            self._saves.forget(path)
            self._unknown.pop(path, None)
            if not _is_folder(self.top + path):
                _remove_quietly(self.top + path)
        self._to_be_shown.clear()

    # Internals

    def _without_links(self, folder: str) -> str:
        known = self._folders.get(folder)
        if known is None:
            if folder == os.path.dirname(folder):
                return folder
            if len(self._folders) > _MOST_FOLDERS:
                self._folders.clear()
            known = self.find(folder)
            if _exists(self.place(known)):
                self._folders[folder] = known
        return known

    def _is_hidden(self, path: str) -> bool:
        while self._hidden and path != os.path.dirname(path):
            if path in self._hidden:
                return self._hidden[path]
            path = os.path.dirname(path)
        return False

    def _look(self, path: str) -> None:
        """Take in the main rank's changes, if it may have changed a file at `path` that this rank sees there."""
        if not self._is_hidden(path) and self._changes.may_have_changed(path):
            self.catch_up()

    def catch_up(self) -> None:
        """Take in the main rank's changes."""
        for before in self._changes.news():
            if before.kind == "shared":
                self._to_be_shown.append(before.path)  # until `see_what_is_shared`
            elif before.kind == "nothing":
                self._hidden[before.path] = True  # also if this rank has made something there: it stays visible on top
            elif not (_exists(self.top + before.path) or self._is_hidden(before.path)):
                self._restore(before)

    def _restore(self, before: Before) -> None:
        """Recreate, for this rank, what was at a path before the main rank changed it."""
        own = self.top + before.path
        self._make_own(os.path.dirname(before.path))
        if before.kind == "folder":
            posix.mkdir(own)
        elif before.kind == "link":
            posix.symlink(before.content or b"", os.fsencode(own))
            self._folders.clear()
        else:
            with _io.open(own, "wb") as file:
                file.write(before.content or b"")
            posix.truncate(own, before.size)
            posix.utime(own, ns=(before.modified_ns, before.modified_ns))
            if before.content is None:
                self._unknown[before.path] = before
        if before.kind != "link":
            needed = stat.S_IRWXU if before.kind == "folder" else stat.S_IRUSR | stat.S_IWUSR
            posix.chmod(own, before.mode | needed)

    def _is_known(self, path: str) -> bool:
        """Whether the content of a file is known. If the main rank has only opened or moved it so far, copies it."""
        before = self._unknown.get(path)
        if before is not None and before == state_of(path):
            copy_file(path, self.top + path)
            posix.utime(self.top + path, ns=(before.modified_ns, before.modified_ns))
            if before == state_of(path):  # not changed meanwhile
                del self._unknown[path]
        return path not in self._unknown

    def _forget(self, path: str) -> None:
        self._saves.forget(path)
        self._unknown.pop(path, None)
        self._hidden[path] = True
        self._folders.clear()

    def _make_folder_of(self, path: str) -> None:
        """Create the folder of `path` below `top`; raises OSError if this rank sees no such folder."""
        folder = os.path.dirname(path)
        if not _is_folder(self.place(folder)):
            raise _error(errno.ENOTDIR if _exists(self.place(folder)) else errno.ENOENT, path)
        self._make_own(folder)

    def _make_own(self, folder: str) -> None:
        if not _is_folder(self.top + folder):
            self._make_own(os.path.dirname(folder))
            posix.mkdir(self.top + folder)

    def _copy(self, path: str, place: str) -> None:
        """Copy the file or folder at `place`, with its contents, below `top`, as far as it is not there yet."""
        own = self.top + path
        now = state_of(place)._replace(path=path)
        names = self.names(path) if now.kind == "folder" else []
        if now.kind in ("folder", "link") and not _exists(own):
            self._restore(now)
        for name in names:
            inner = os.path.join(path, name)
            self._copy(inner, self._seen_at(inner))
        if now.kind == "file" and place != own:
            partial = own + PRIVATE
            copy_file(place, partial)
            posix.utime(partial, ns=(now.modified_ns, now.modified_ns))
            posix.chmod(partial, now.mode | stat.S_IRUSR | stat.S_IWUSR)
            self._look(path)  # the main rank may have changed it meanwhile, which it has announced before
            if _exists(own) and path not in self._saves:  # what was there before
                posix.unlink(partial)
            else:
                posix.replace(partial, own)

    def _check_target(self, source: str, is_folder: bool, to: str, must_be_new: bool) -> None:
        mode = _mode(self._seen_at(to))
        if must_be_new:
            number = errno.EEXIST if mode else 0
        elif stat.S_ISDIR(mode):
            number = 0 if is_folder and not self.names(to) else (errno.ENOTEMPTY if is_folder else errno.EISDIR)
        else:
            number = errno.ENOTDIR if is_folder and mode else 0
        if number:
            raise _error(number, source, to)


def copy_file(source: str, to: str) -> None:
    """Copy a file's bytes. Calls no function that is replaced in the program."""
    with _io.open(source, "rb") as reading, _io.open(to, "wb") as writing:
        shutil.copyfileobj(reading, writing)


def _mode(path: str) -> int:
    """Return the mode of what is at `path`, without following a link; 0 if there is nothing."""
    try:
        return posix.lstat(path).st_mode
    except OSError:
        return 0


def _exists(path: str) -> bool:
    return _mode(path) != 0


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(_mode(path))


def _leads_to(path: Any, folder: str) -> bool:
    """Whether `path` is `folder` on the disk too: not by a link of this rank, nor from a working folder of its own."""
    with contextlib.suppress(OSError):
        return os.path.samestat(posix.stat(path), posix.stat(folder))
    return False


def _remove_quietly(path: str) -> None:
    if _exists(path):
        posix.unlink(path)


def _error(number: int, path: str, to: Optional[str] = None) -> OSError:
    return OSError(number, os.strerror(number), path, None, to)
