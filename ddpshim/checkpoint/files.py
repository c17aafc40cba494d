"""Writes files that are whole or absent: the main rank writes beside the path, and renames when all is written.

The decision when to save is the caller's, and so is the content: the keys of a wrapped network are the bare network's.
What is saved in the background is on the disk a moment later; every other function here waits for it first.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import glob
import os
import secrets
import shutil
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional, Union

import torch

from ddpshim.checkpoint import snapshot
from ddpshim.checkpoint.background import Background, JobFailed
from ddpshim.errors import CheckpointError
from ddpshim.job import events, failure, machine
from ddpshim.job.group import has_world, on_cleanup, world
from ddpshim.job.replaced import replaced
from ddpshim.job.say import say

PathLike = Union[str, "os.PathLike[str]"]
_PARTIAL = ".partial"
_LEAST_BYTES = 32 << 20  # what is smaller is on the disk before a process is told about it
_FAILING_DEADLINE_S = 5.0
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
_OF_TORCHS_WRITER = ("PytorchStreamWriter", "inline_container", "Parent directory")  # it raises nothing more telling
_DISK_ERRORS |= {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


def save(obj: Any, path: PathLike) -> None:
    """`obj` in the file `path`, for `torch.load`. Written by the main rank; local: nobody waits for it.

    Whatever happens, `path` is at any moment the file that it was or the new one. The same with one process.

    Raises:
        CheckpointError: on the main rank, the file could not be written; the old one is as it was.
    """
    if world().is_main:
        with noted(path), written(path, num_bytes=_num_bytes(obj)) as partial:
            torch.save(obj, str(partial))


def save_in_background(obj: Any, path: PathLike) -> None:
    """`obj` as it is now in the file `path`, a moment later: the main rank waits for a copy in memory alone. Local.

    A process of its own writes the file, the one that :func:`save` would have written. One is written at a time: the
    next call waits for it, and so do `flush`, whoever looks at files through this module, `cleanup` and the end of the
    program. The file outlives a program that is killed. `save` itself where `obj` is small, or there is no memory.

    Raises:
        CheckpointError: on the main rank, the file before this one could not be written, or this one visibly cannot.
    """
    if not world().is_main:
        return
    start = time.perf_counter()
    flush()
    num_bytes = _num_bytes(obj)
    if not _is_for_the_background(num_bytes, path):
        save(obj, path)
        return
    try:
        background = _writer.start()
        taken = snapshot.take(obj, _writer.buffer, num_bytes)
    except Exception as error:
        save(obj, path)  # if it is the object's fault, this says so
        warnings.warn(
            f"{os.fspath(path)} was written while training waited, because its content could not be copied into "
            f"shared memory ({type(error).__name__}: {error}). DDPSHIM_BACKGROUND_SAVE=no avoids the attempt.",
            stacklevel=2,
        )
        return
    final = os.path.abspath(path)
    background.do(functools.partial(_write_snapshot, taken, final, num_bytes), final)
    events.note("checkpoint", path=final, bytes=num_bytes, seconds=time.perf_counter() - start, in_background=True)


def get_ready(obj: Any) -> None:
    """Make the first :func:`save_in_background`, of `obj` or the like, as quick as those after it. Local; main rank.

    Starts the process, and takes the memory for the copy meanwhile. Nothing where `obj` is small, or memory short.
    """
    num_bytes = _num_bytes(obj)
    if world().is_main and num_bytes >= _LEAST_BYTES and _writer.can_take(num_bytes):
        _writer.start()
        _writer.buffer.grow_soon(snapshot.size(num_bytes))


def afterwards(function: Callable[..., Any], *args: Any) -> None:
    """Call `function(*args)` when all that is saved in the background is on the disk, there; else now. Local.

    For what must not be done to files before: `function` and its arguments can be pickled. Not called after an error.
    """
    if _writer.is_busy():
        what = f"{getattr(function, '__name__', function)}{args}"
        _writer.start().do(functools.partial(function, *args), what)
    else:
        function(*args)


def flush() -> None:
    """Wait until what was saved in the background is on the disk. Local; nothing where nothing was.

    Raises:
        CheckpointError: something of it could not be written; what was there before is as it was.
    """
    with events.counted("save"):
        _writer.wait()


def copy(source: PathLike, path: PathLike) -> None:
    """The content of `source` in the file `path`, in the way of :func:`save`. Local.

    Raises:
        FileNotFoundError: on the main rank, there is no `source`.
        CheckpointError: on the main rank, as for `save`.
    """
    if world().is_main:
        flush()
        _copy(source, path)


def copy_in_background(source: PathLike, path: PathLike) -> None:
    """As :func:`copy`, after what is saved in the background, and without waiting for it. Local.

    Raises:
        FileNotFoundError, CheckpointError: as `copy`; in the background, a later call of this module.
    """
    if world().is_main:
        afterwards(_copy, os.path.abspath(source), os.path.abspath(path))


def save_whole(save: Callable[..., None], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """`save(obj, f, ...)`, which is `torch.save`; a file that `f` names is at any moment the old or the new one. Local.

    Raises CheckpointError where such a file could not be written.
    """
    if isinstance(f, (str, os.PathLike)) and (os.path.isfile(f) or not os.path.exists(f)):  # no pipe, no device
        with noted(f), written(f) as partial:
            save(obj, str(partial), *args, **kwargs)
    else:
        save(obj, f, *args, **kwargs)


@contextlib.contextmanager
def noted(path: PathLike) -> Iterator[None]:
    """Have the records of the run say that the block wrote the checkpoint `path`, and how long it took. Local."""
    start = time.perf_counter()
    with events.counted("save"):
        yield
    if events.is_recorded():
        seconds, final = time.perf_counter() - start, os.path.abspath(path)
        events.note("checkpoint", path=final, bytes=os.stat(final).st_size, seconds=seconds, in_background=False)


@contextlib.contextmanager
def written(path: PathLike, num_bytes: Optional[int] = None, in_background: bool = False) -> Iterator[str]:
    """The name of a file to write: when the block ends it is moved to `path`, after an error removed. Local.

    The name prints as `path` (in `format` and f-strings), so that code which reports where it saved to stays right.
    A process that is killed leaves a hidden `.NAME.*.partial`, which the next write of `path` removes.

    Args:
        path: where the file will be.
        num_bytes: how much will be written, for the error's text.
        in_background: what the block gives to `torch.save` for that name goes to `save_in_background`.

    Raises:
        CheckpointError: the file could not be written, or one that was saved in the background.
    """
    flush()
    final = os.fspath(path)
    folder, name = os.path.split(os.path.realpath(final))
    partial = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}")
    try:
        for left in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*{_PARTIAL}")):
            os.unlink(left)
        with _led_to_background(partial, final) if in_background else contextlib.nullcontext() as led:
            yield _Name(partial, final)
        if led:
            return
        _flush(partial, os.O_RDWR)
        os.replace(partial, os.path.join(folder, name))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        if _is_about_the_disk(error):
            raise CheckpointError(_describe(error, final, folder, num_bytes)) from error
        raise
    # Without it the new name may be gone after a power cut. The file is in place: a file system without it may do.
    with contextlib.suppress(OSError):
        _flush(folder, os.O_RDONLY)


def keep_newest(folder: PathLike, pattern: str, num_kept: int) -> list[Path]:
    """Remove all files of `folder` that match `pattern` but the newest `num_kept`; what was removed.

    The main rank removes; elsewhere the list is empty. Local.

    Raises:
        CheckpointError: `num_kept` is below 1, and nothing would be left to resume from.
    """
    if num_kept < 1:
        raise CheckpointError(
            f"num_kept={num_kept} would remove every checkpoint in {os.fspath(folder)}; nothing would be left to "
            "resume from. Keep 1 or more."
        )
    if not world().is_main:
        return []
    flush()
    removed = _newest_first(folder, pattern)[num_kept:]
    for path in removed:
        path.unlink()
    return removed


def find_latest(folder: PathLike, pattern: str) -> Optional[Path]:
    """The newest file of `folder` that matches `pattern` and is whole; None where there is none. Local.

    The newest is the one that was written last, whatever number is in its name. Files that are truncated or damaged
    are passed over, with a warning. Several ranks may see different files on a shared disk that is written to:
    `world.run_on_main(find_latest, folder, pattern)` decides once.
    """
    flush()
    for path in _newest_first(folder, pattern):
        damage = find_damage(path)
        if damage is None:
            return path
        warnings.warn(
            f"checkpoint {path} is damaged ({damage}) and was skipped; the previous one is used, if any. Remove it.",
            stacklevel=2,
        )
    return None


def find_damage(path: PathLike) -> Optional[str]:
    """What is wrong with a file that `torch.save` wrote, or None. Local.

    Reads it once against the checksums in it, which `torch.load` does not compare; runs nothing of what it holds.
    """
    if not os.path.isfile(path):
        return "not a regular file"  # to open a pipe would take for ever
    try:
        with zipfile.ZipFile(path) as file:
            bad, names = file.testzip(), file.namelist()
    except Exception as error:  # of zipfile, struct, zlib or a name's encoding
        return f"{type(error).__name__}: {error}"
    if bad is not None:
        return f"its part {bad} does not match its checksum"
    return None if any(name.endswith("data.pkl") for name in names) else "it is not one of torch's files"


class _Writer:
    """The process that writes in the background, from the first file on, and what it shares with this one."""

    background: Optional[Background] = None
    buffer: snapshot.Buffer

    @property
    def here(self) -> Optional[Background]:
        """The process, where this one has started it, and not one that this one was forked from."""
        return self.background if self.background is not None and self.background.is_here else None

    def start(self) -> Background:
        """The process, started where there is none."""
        if self.here is not None:
            if not self.here.has_ended or self.here.is_busy:
                return self.here
            self.end()
        self.buffer = snapshot.Buffer()
        self.background = Background(__name__, [self.buffer.descriptor])
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        if has_world():
            on_cleanup(_at_cleanup)
        return self.background

    def can_take(self, num_bytes: int) -> bool:
        """Whether there is memory for so much, and a process may be there to write it."""
        if not hasattr(os, "memfd_create") or not sys.executable:
            return False
        if self.here is not None and self.here.did_not_start:
            return False
        more = num_bytes - (0 if self.here is None else self.buffer.num_bytes)
        return 2 * more <= (machine.memory().available_bytes or 0)

    def is_busy(self) -> bool:
        """Whether something is on its way, or has failed and was not told."""
        return self.here is not None and self.here.is_busy

    def wait(self, timeout_s: Optional[float] = None) -> None:
        """Wait for what is on its way; raises CheckpointError where it failed."""
        if self.here is not None and self.here.is_busy:
            try:
                self.here.wait(timeout_s)
            except JobFailed as error:
                raise CheckpointError(str(error)) from None

    def end(self) -> None:
        """Let the process go; it finishes what it is at."""
        if self.here is not None:
            self.here.end()
            self.buffer.close()
            self.background = None


_writer = _Writer()


def _is_for_the_background(num_bytes: int, path: PathLike) -> bool:
    """Not where the other way is quicker, and not where the error would come later than it could."""
    folder = os.path.dirname(os.path.realpath(path))
    return (
        num_bytes >= _LEAST_BYTES
        and _writer.can_take(num_bytes)
        and os.access(folder, os.W_OK)
        and shutil.disk_usage(folder).free > num_bytes
    )


def _write_snapshot(taken: snapshot.Snapshot, path: str, num_bytes: int) -> None:
    with written(path, num_bytes) as partial:
        taken.write(str(partial))


def _copy(source: PathLike, path: PathLike) -> None:
    num_bytes = os.stat(source).st_size
    with written(path, num_bytes) as partial:
        shutil.copyfile(source, partial)


@contextlib.contextmanager
def _led_to_background(name: str, path: str) -> Iterator[list[str]]:
    """Have `torch.save(obj, name)` save in the background, to `path`; then the list is not empty."""
    led: list[str] = []
    original = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str) and f == name and not args and not kwargs:
            led.append(path)
            save_in_background(obj, path)
        else:
            original(obj, f, *args, **kwargs)

    with replaced(torch, "save", save):
        yield led


def _at_cleanup() -> None:
    """Wait, but not for long where this rank fails: what is on its way is finished without it."""
    failing = failure.on_the_way_out()
    try:
        _writer.wait(_FAILING_DEADLINE_S if failing else None)
    except CheckpointError as error:
        if not failing:
            raise
        say(str(error), directly=True)
    finally:
        _writer.end()


def _at_exit() -> None:
    """Raised from here an error would leave the exit code at 0."""
    try:
        flush()
    except CheckpointError as error:
        if threading.current_thread() is threading.main_thread():
            failure.abort(error)
        say(str(error), directly=True)  # `abort` has this called, in a thread


class _Name(str):
    """A file's name that prints as another."""

    _shown: str

    def __new__(cls, name: str, shown: str) -> _Name:
        made = super().__new__(cls, name)
        made._shown = shown
        return made

    def __format__(self, spec: str) -> str:
        return format(self._shown, spec)


def _flush(path: str, flags: int) -> None:
    """Have the disk hold what was written to `path`."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _newest_first(folder: PathLike, pattern: str) -> list[Path]:
    found = [p for p in Path(folder).glob(pattern) if p.is_file() and not (p.is_symlink() or p.name.endswith(_PARTIAL))]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path), reverse=True)


def _is_about_the_disk(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _DISK_ERRORS
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_TORCHS_WRITER)


def _describe(error: BaseException, final: str, folder: str, num_bytes: Optional[int]) -> str:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    needed = "" if num_bytes is None else f", {num_bytes:,} bytes needed"
    try:
        needed += f", {shutil.disk_usage(folder).free:,} bytes free"
    except OSError:
        needed += ", no such directory"
    return (
        f"{final} could not be written ({said}{needed}); this state would be lost; the previous file is unchanged. "
        "Make room, or save to a writable directory."
    )


def _num_bytes(obj: Any) -> int:
    """The bytes of the tensors in nested dictionaries, lists and tuples, each storage once."""
    found: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                visit(inner)

    visit(obj)
    return sum(found.values())
