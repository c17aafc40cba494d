"""Replaces all files or none: staged on disk, then renamed into place, by one process at a time.

Never in place: package managers hard-link installed files to a cache that other environments share.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from ddpshim.errors import PatchError
from ddpshim.reading import read_bytes

LOCK = ".ddpshim-lock"
_LONGEST_OWNER = 400  # characters: a number and a name
_LOCK_TIMEOUT_S = 10.0


def temporary(path: Path) -> Path:
    """Return the path where `stage` writes the new content of `path`."""
    # A fixed name: the lock keeps other processes away, and the next run removes the file of a killed one.
    return path.with_name(f".{path.name}.ddpshim-tmp")


def stage(path: Path, content: bytes) -> None:
    """Write `content` to a synced file beside `path`, with the mode and owner of `path` if that exists."""
    temporary(path).unlink(missing_ok=True)
    handle = os.open(temporary(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
        stream.flush()
        if path.exists():
            like = path.stat()
            if hasattr(os, "geteuid") and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                # Only root may change the owner; for other users the replaced file becomes their own.
                with contextlib.suppress(PermissionError):
                    os.chown(temporary(path), like.st_uid, like.st_gid)
            os.chmod(temporary(path), like.st_mode & 0o7777)
        os.fsync(stream.fileno())


def replace(path: Path, content: bytes) -> None:
    """Replace the file `path` by `stage` and rename: it has its previous content or all of `content`."""
    stage(path, content)
    os.replace(temporary(path), path)


def drop_bytecode(*sources: Path) -> None:
    """Remove every interpreter's cached bytecode of `sources`: Python checks a ``.pyc`` by time (s) and size only."""
    for source in sources:
        if source.suffix == ".py":
            cached = Path(importlib.util.cache_from_source(str(source))).parent
            for folder in {source.parent / "__pycache__", cached}:
                for path in folder.glob(f"{glob.escape(source.stem)}.*.pyc"):
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the package's lock file; wait for a live owner, replace that of a dead one on this host.

    Raises PatchError after ten seconds, and at once if the folder is not writable.
    """
    path = directory / LOCK
    owner = ""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            break
        except FileExistsError:
            if _drop_stale_lock(path):
                continue
            if time.monotonic() > deadline:
                with contextlib.suppress(OSError):
                    owner = read_bytes(path).decode(errors="replace").strip()
                raise PatchError(
                    f"{path} is held by another ddpshim (pid and host: {owner or 'not written yet'}); two at once "
                    "could mix their writes, so nothing was changed. Wait for the other; if no such process runs, "
                    "delete the file."
                ) from None
            time.sleep(0.05)
        except OSError as error:
            raise PatchError(
                f"Could not create {path}: {error}. Nothing was changed. Make the folder writable, or use your own "
                "environment."
            ) from error
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(f"{os.getpid()} {platform.node()}\n")
        yield
    finally:
        path.unlink(missing_ok=True)


def _drop_stale_lock(path: Path) -> bool:
    """Remove the lock of a dead process; return whether the lock is gone now."""
    if os.name != "posix":  # os.kill(pid, 0) ends the process on Windows
        return False
    import fcntl

    try:
        # O_NONBLOCK: a pipe would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), errors="replace") as stream:
            # If several processes find it stale, only one may remove it: the others would remove its new lock.
            # They wait here, then see that the path is another file.
            fcntl.flock(stream, fcntl.LOCK_EX)
            pid, _, host = stream.read(_LONGEST_OWNER).strip().partition(" ")
            if not (pid.isascii() and pid.isdigit()) or host != platform.node() or _is_alive(int(pid)):
                return False
            if os.path.samestat(os.fstat(stream.fileno()), os.stat(path)):
                path.unlink()
    except FileNotFoundError:
        return not path.is_symlink()  # a dangling symlink remains
    except OSError:
        # No flock on this file system, or no permission to read: `locked` raises at its deadline.
        return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # a process of another user
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
