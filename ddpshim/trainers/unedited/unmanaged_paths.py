"""Decides which files do not belong to a trainer: devices, caches, temporary files, files of libraries."""

from __future__ import annotations

import contextlib
import fcntl
import os
import posix
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Callable, Optional

from ddpshim import variables
from ddpshim.trainers.unedited.file_calls import in_place

PRIVATE = "ddpshim-files-"  # the name of a rank's private folder begins with it
# Files that these write are never redirected: they have one per process, or are safe with several processes.
_LIBRARIES = ("ddpshim", "multiprocessing", "importlib", "triton", "numba", "torch._inductor", "torch._dynamo")
# These write on behalf of their callers.
_PASS_ON = ("pathlib", "os", "posixpath", "genericpath", "shutil", "io", "codecs", "gzip", "tempfile", "contextlib")
_OURS_THAT_PASS_ON = (__name__.rpartition(".")[0], "ddpshim.model.guard")
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

    def takes_note(self, path: str, frame: Optional[FrameType]) -> bool:
        """Record `path` and return True if it is a new temporary file: `frame`, which makes it, is in `tempfile`."""
        if frame is None or frame.f_globals.get("__name__") != "tempfile":
            return False
        folder, name = os.path.split(os.path.join(posix.getcwd(), path))
        if os.path.realpath(folder) != self._temporary:
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

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within this block, `fcntl.flock` and `fcntl.lockf` are replaced: they note what the main thread locks."""
        with in_place({id(real): self._noted(real) for real in (fcntl.flock, fcntl.lockf)}):
            yield

    def held(self) -> str:
        """Return a file that the main thread, which asks, has locked; "" if there is none."""
        if not self._held or threading.current_thread() is not threading.main_thread():
            return ""
        return next((file for number, file in self._held.items() if _file_of(number) == file), "")  # else it is closed

    def _noted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(fd: Any, operation: int, *rest: Any) -> Any:
            answer = real(fd, operation, *rest)
            number = fd if isinstance(fd, int) else fd.fileno()
            file = _file_of(number)
            if operation & fcntl.LOCK_UN:
                self._held.pop(number, None)
            elif threading.current_thread() is threading.main_thread() and self._places.has(file):
                self._held[number] = file
            return answer

        return stand_in


def _file_of(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""
