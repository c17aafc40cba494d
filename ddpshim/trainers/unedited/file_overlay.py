"""One rank's view of the files: its own changes, on top of the files that existed when the job began.

Paths in this file are absolute and contain no folder that is a link; `View.find` returns such paths. A file that a rank
has made is at the same path below the rank's private folder, `View.top`.
"""

from __future__ import annotations

import _io
import errno
import os
import posix
import shutil
import stat
import tempfile
from typing import Optional

from ddpshim.errors import SyncError
from ddpshim.trainers.unedited.file_calls import PRIVATE, is_special
from ddpshim.trainers.unedited.main_file_log import Before, MainsChanges, MainsSaves
from ddpshim.variables import RUN_DIR

_MOST_LINKS = 40
_MOST_FOLDERS = 10_000  # folders whose path without links is cached


class View:
    """The files as this rank sees them. Local, except that reading a file in `saves` waits for the main rank."""

    def __init__(self, changes: MainsChanges, saves: MainsSaves) -> None:
        self.top = os.path.realpath(tempfile.mkdtemp(prefix=PRIVATE, dir=os.environ.get(RUN_DIR)))
        self.folder = posix.getcwd()
        self._changes, self._saves = changes, saves
        # Both sets stand for their paths and everything below them.
        self._gone: set[str] = set()  # removed, or absent when the job began
        self._shown: set[str] = set()  # made by the main rank for all ranks
        self._to_be_shown: list[str] = []
        self._unknown: set[str] = set()  # files that the main rank has changed and whose content is too large to send
        self._folders: dict[str, str] = {}

    def remove_all(self) -> None:
        """Remove all that this rank has made."""
        shutil.rmtree(self.top, ignore_errors=True)

    # Finding paths

    def find(self, path: str, follows: bool = True) -> str:
        """Return the program's `path` as an absolute path without links; `follows`: also resolve its last part."""
        for _ in range(_MOST_LINKS):
            path = self._in_its_folder(path)
            place = self.place(path) if follows and path not in self._saves else ""
            if not stat.S_ISLNK(_mode(place)):
                return path
            path = os.path.join(os.path.dirname(path), posix.readlink(place))
        raise _error(errno.ELOOP, path)

    def locate(self, path: str, follows: bool = True) -> tuple[str, str]:
        """Return `find(path)` and the `place` of that path."""
        path = self.find(path, follows)
        return path, self.place(path)

    def place(self, path: str) -> str:
        """Return where to read the file at `path`; a path where nothing exists if this rank sees nothing there."""
        own = self.top + path
        if _exists(own):
            return own
        if path in self._saves:
            if not self._saves.wait_for(path) or _exists(path):
                return path
            # The main rank has removed it again, as this rank will: until then an empty file represents it.
            self._make_own(os.path.dirname(path))
            posix.close(posix.open(own, os.O_WRONLY | os.O_CREAT))
            self._unknown.add(path)
            return own
        # The disk first: the main rank announces a file before it makes it, so the news cover every file seen here.
        is_there = _exists(path)
        if not self._is_hidden(path):
            self._look(path)
        return path if is_there and not _exists(own) and not self._is_hidden(path) else own

    def place_with_content(self, path: str) -> str:
        """Return the `place` of a file to be read. Raises SyncError if its earlier content is no longer known."""
        place = self.place(path)
        if path in self._unknown or self._saves.is_newer(path):
            raise SyncError(
                f"{path} is read on this rank after the main rank changed or removed it; ranks would read different "
                "files. Read it before the main rank changes it, for example in an earlier training step."
            )
        return place

    def place_to_write(self, path: str, keeps: bool, is_new: bool = False) -> str:
        """Return where to write the file at `path`; `keeps`: with its content; `is_new`: it must not exist yet."""
        own = self.top + path
        self._make_folder_of(path)  # first, because it may take in news
        place = None if path in self._saves else self.place(path)
        if place is not None and is_special(place):
            return place
        if is_new and (place is None or _exists(place)):
            raise _error(errno.EEXIST, path)
        if keeps and path not in self._unknown:
            self._copy(path, self.place(path), own)
        elif place is not None and _is_folder(place) and place != own:
            posix.mkdir(own)
        if place is not None and not _exists(place) and not self._is_hidden(path):
            self._gone.add(path)  # hides the file that the main rank makes there
        self._saves.forget(path)
        self._unknown.discard(path)
        return own

    def names(self, folder: str) -> list[str]:
        """Return the names in an existing folder: first those on the disk in its order, then the others, sorted."""
        own, found = self.top + folder, posix.listdir(folder) if _is_folder(folder) else []
        if not self._is_hidden(folder):
            self._look(folder)
        own_names = {*(posix.listdir(own) if _is_folder(own) else ())}
        own_names |= {*self._saves.in_folder(folder)}
        gone = {os.path.basename(path) for path in self._gone if os.path.dirname(path) == folder}
        shared = {*found} - gone if not self._is_hidden(folder) else set()
        shared |= {os.path.basename(path) for path in self._shown if os.path.dirname(path) == folder}
        return [name for name in found if name in own_names or name in shared] + sorted(own_names.difference(found))

    def has_own(self, folder: str) -> bool:
        """Whether this rank sees `folder` differently from the disk."""
        if self._is_hidden(folder) or _is_folder(self.top + folder):
            return True
        self._look(folder)
        has_gone = any(os.path.dirname(path) == folder for path in self._gone)
        return has_gone or _is_folder(self.top + folder) or bool(self._saves.in_folder(folder))

    # Changing files

    def leave_to_main(self, path: str) -> None:
        """Record that the main rank saves the file at `path`, and drop this rank's own."""
        _remove_quietly(self.top + path)
        self._unknown.discard(path)
        self._saves.note(path)

    def remove(self, path: str, is_folder: bool) -> None:
        """os.rmdir, or os.unlink."""
        if path in self._saves:
            _remove_quietly(self.top + path)
        else:
            mode = posix.lstat(self.place(path)).st_mode
            if is_folder and stat.S_ISDIR(mode) and self.names(path):
                raise _error(errno.ENOTEMPTY, path)
            if is_folder != stat.S_ISDIR(mode):
                raise _error(errno.ENOTDIR if is_folder else errno.EISDIR, path)
            if _exists(self.top + path):  # news may have been taken in since `place`
                (posix.rmdir if is_folder else posix.unlink)(self.top + path)
            self._folders.clear()
        self._forget(path)

    def move(self, source: str, to: str, keeps_source: bool = False) -> None:
        """os.rename, or os.link with `keeps_source`; also of files in `saves`."""
        if source == to:
            return
        if not _is_folder(self.place(os.path.dirname(to))):
            raise _error(errno.ENOENT, source, to)
        if source in self._saves:
            for path in (source, to):
                _remove_quietly(self.top + path)
        else:
            info = posix.lstat(self.place(source))
            self._check_target(source, stat.S_ISDIR(info.st_mode), to, keeps_source)
            self._make_folder_of(to)
            self._make_folder_of(source)
            self._copy(source, self.place(source), self.top + source)
            if _exists(self.top + to) and stat.S_ISDIR(info.st_mode):
                posix.rmdir(self.top + to)
            (posix.link if keeps_source else posix.replace)(self.top + source, self.top + to)
        self._unknown.discard(to)
        self._saves.move(source, to, keeps_source)
        if not keeps_source:
            self._forget(source)
            self._gone.add(to)  # hides the previous file or folder there
        self._folders.clear()

    def link_to(self, target: str, path: str) -> None:
        """os.symlink."""
        posix.symlink(target, self.place_to_write(path, keeps=False, is_new=True))
        self._folders.clear()

    def see_what_is_shared(self) -> None:
        """Show what the main rank has made for all ranks so far."""
        self.catch_up()
        for path in self._to_be_shown:
            self._gone.discard(path)
            self._shown.add(path)
            self._saves.forget(path)
            self._unknown.discard(path)
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

    def _in_its_folder(self, path: str) -> str:
        """Return `path` as an absolute path whose folder contains no links."""
        path = os.path.normpath(os.path.join(self.folder, path))
        if f"{path}/".startswith(f"{self.top}/"):  # a private path that the program got from an open file's name
            path = path[len(self.top) :] or "/"
        folder, name = os.path.split(path)
        return os.path.join(self._without_links(folder), name)

    def _is_hidden(self, path: str) -> bool:
        while self._gone and path != os.path.dirname(path):
            if path in self._gone or path in self._shown:
                return path in self._gone
            path = os.path.dirname(path)
        return False

    def _look(self, path: str) -> None:
        """Take in the main rank's changes, if it may have changed the file at `path`."""
        if self._changes.may_have_changed(path):
            self.catch_up()

    def catch_up(self) -> bool:
        """Take in the main rank's changes; return whether there were new ones."""
        news = [*self._changes.news()]
        for before in news:
            if before.kind == "shared":
                self._to_be_shown.append(before.path)  # until `see_what_is_shared`
            elif before.kind == "nothing":
                self._gone.add(before.path)  # also if this rank has made something there: it stays visible on top
            elif not (_exists(self.top + before.path) or self._is_hidden(before.path)):
                self._restore(before)
        return bool(news)

    def _restore(self, before: Before) -> None:
        """Recreate, for this rank, what was at a path before the main rank changed it."""
        own = self.top + before.path
        if before.path in self._saves:
            return
        self._make_own(os.path.dirname(before.path))
        if before.kind == "folder":
            posix.mkdir(own)
        elif before.kind == "link":
            posix.symlink(before.content or b"", os.fsencode(own))
            self._folders.clear()
        else:
            with _io.open(posix.open(own, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.write(before.content or b"")
            posix.truncate(own, before.size)
            posix.utime(own, ns=(before.modified_ns, before.modified_ns))
            if before.content is None:
                self._unknown.add(before.path)
        if before.kind != "link":
            posix.chmod(own, before.mode | stat.S_IRWXU)

    def _forget(self, path: str) -> None:
        self._saves.forget(path)
        self._unknown.discard(path)
        self._shown.discard(path)
        self._gone.add(path)

    def _make_folder_of(self, path: str) -> None:
        """Create the folder of `path` below `top`; raises OSError if this rank sees no such folder."""
        folder = os.path.dirname(path)
        if not _is_folder(self.place(folder)):
            raise _error(errno.ENOTDIR if _exists(self.place(folder)) else errno.ENOENT, path)
        self._make_own(folder)

    def _make_own(self, folder: str) -> None:
        missing = []
        while not _is_folder(self.top + folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(missing):
            posix.mkdir(self.top + folder)

    def _copy(self, path: str, place: str, own: str) -> None:
        """Copy the file or folder at `place` to `own`, with its contents, as far as it is not there yet."""
        try:
            info = posix.lstat(place)
        except OSError:
            return
        if stat.S_ISDIR(info.st_mode):
            names = self.names(path)
            if not _exists(own):
                posix.mkdir(own, stat.S_IMODE(info.st_mode) | stat.S_IRWXU)
            for name in names:
                inner = os.path.join(path, name)
                if inner not in self._saves:
                    self._copy(inner, self.place(inner), self.top + inner)
        elif place != own and stat.S_ISLNK(info.st_mode):
            posix.symlink(posix.readlink(place), own)
        elif place != own:
            copy_file(place, own)
            posix.utime(own, ns=(info.st_atime_ns, info.st_mtime_ns))
            posix.chmod(own, stat.S_IMODE(info.st_mode) | stat.S_IRUSR | stat.S_IWUSR)

    def _check_target(self, source: str, is_folder: bool, to: str, must_be_new: bool) -> None:
        place = self.place(to) if to not in self._saves else ""
        if to in self._saves or not _exists(place):
            number = errno.EEXIST if must_be_new and to in self._saves else 0
        elif must_be_new:
            number = errno.EEXIST
        elif stat.S_ISDIR(posix.lstat(place).st_mode):
            number = 0 if is_folder and not self.names(to) else (errno.ENOTEMPTY if is_folder else errno.EISDIR)
        else:
            number = errno.ENOTDIR if is_folder else 0
        if number:
            raise _error(number, source, to)


def copy_file(source: str, to: str) -> None:
    """Copy a file's bytes. Calls no function that is replaced in the program."""
    with _io.open(posix.open(source, os.O_RDONLY), "rb") as reading:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with _io.open(posix.open(to, flags, 0o666), "wb") as writing:
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


def _remove_quietly(path: str) -> None:
    if _exists(path):
        posix.unlink(path)


def _error(number: int, path: str, to: Optional[str] = None) -> OSError:
    return OSError(number, os.strerror(number), path, None, to)
