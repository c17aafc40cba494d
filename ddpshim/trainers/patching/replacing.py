"""Replaces files all or none: staged on disk, renamed into place, by one process at a time.

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
    """Where `stage` puts the new content of `path`."""
    # A fixed name: the lock keeps others away, and the next run clears what a killed one left.
    return path.with_name(f".{path.name}.ddpshim-tmp")


def stage(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, on disk, with the mode and owner of `path` if that exists."""
    temporary(path).unlink(missing_ok=True)
    handle = os.open(temporary(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
        stream.flush()
        if path.exists():
            like = path.stat()
            if hasattr(os, "geteuid") and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                # Only root may give files away; for others the replaced file becomes theirs.
                with contextlib.suppress(PermissionError):
                    os.chown(temporary(path), like.st_uid, like.st_gid)
            os.chmod(temporary(path), like.st_mode & 0o7777)
        os.fsync(stream.fileno())


def replace(path: Path, content: bytes) -> None:
    """`stage` and rename: the file `path` is as it was, or has this `content`."""
    stage(path, content)
    os.replace(temporary(path), path)


def drop_bytecode(*sources: Path) -> None:
    """Remove every interpreter's cached bytecode: a ``.pyc`` is checked by second and size only."""
    for source in sources:
        if source.suffix == ".py":
            cached = Path(importlib.util.cache_from_source(str(source))).parent
            for folder in {source.parent / "__pycache__", cached}:
                for path in folder.glob(f"{glob.escape(source.stem)}.*.pyc"):
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the package's lock file; waits for a live owner, takes over from a dead one on this host.

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
    """True if the lock of a dead process was removed or has gone meanwhile."""
    if os.name != "posix":  # os.kill(pid, 0) ends the process on Windows
        return False
    import fcntl

    try:
        # Without waiting for whoever might write to a pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), errors="replace") as stream:
            # Of several that find it stale only one may remove it: the others would remove the winner's new
            # lock. They wait here, then see that the path is another file.
            fcntl.flock(stream, fcntl.LOCK_EX)
            pid, _, host = stream.read(_LONGEST_OWNER).strip().partition(" ")
            if not (pid.isascii() and pid.isdigit()) or host != platform.node() or _is_alive(int(pid)):
                return False
            if os.path.samestat(os.fstat(stream.fileno()), os.stat(path)):
                path.unlink()
    except FileNotFoundError:
        return not path.is_symlink()  # one to nowhere stays
    except OSError:
        # No flock on this file system, or not ours to read: whoever waits is told of it at the deadline.
        return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
