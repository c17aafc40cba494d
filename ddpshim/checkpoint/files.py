"""Writes files atomically: the main rank writes a temporary file beside the path, then renames it.

The caller decides when to save and what: a wrapped network's state has the keys of the bare network. A file saved in
the background is on disk a moment later; functions that write, copy, find or remove files wait for it first.

For that, `torch.save` writes into memory. A thread writes that copy to the file without Python's interpreter lock,
while training continues.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import glob
import io
import os
import secrets
import shutil
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Callable, Optional, Union

import torch

from ddpshim.errors import CheckpointError
from ddpshim.failures import failure
from ddpshim.job.group import world
from ddpshim.process import observed
from ddpshim.process.job import current
from ddpshim.process.observed import outside_steps
from ddpshim.process.say import described, say

PathLike = Union[str, "os.PathLike[str]"]
_PARTIAL = ".partial"
_LEAST_BYTES = 32 << 20  # smaller files are written directly, which is faster
_FAILING_DEADLINE_S = 5.0
_NICE = 5
# In the RuntimeErrors of torch's writer.
_OF_TORCHS_WRITER = ("PytorchStreamWriter", "inline_container", "Parent directory", "iostream error")


def save(obj: Any, path: PathLike) -> None:
    """Save `obj` to the file `path`, for `torch.load`. The main rank writes; local: other ranks do not wait.

    At any moment `path` is either the old file or the complete new one. The same with one process. Raises
    CheckpointError on the main rank if the file could not be written; the old one is unchanged.
    """
    if world().is_main:
        with whole(path) as partial:
            torch.save(obj, partial)


def save_in_background(obj: Any, path: PathLike) -> None:
    """Save `obj` as it is now to the file `path`; the main rank waits only until it is copied in memory. Local.

    A thread writes the same file as :func:`save`. One file is written at a time: the next call waits for it, and so do
    `flush`, functions of this module that use files, `cleanup` and the end of the program. If the program is killed
    before that, the old file is unchanged. If `obj` is small or memory is short, this calls `save`. Raises
    CheckpointError on the main rank if the previous file could not be written, or it is clear that this one cannot.
    """
    if not world().is_main:
        return
    start = time.perf_counter()
    flush()
    num_bytes = _num_bytes(obj)
    if not _is_for_the_background(num_bytes, path):
        save(obj, path)
        return
    writer, final = current().part(Background), os.path.abspath(path)
    with outside_steps():
        writer.copy.seek(0)  # and keep the memory of the earlier copy
        torch.save(obj, writer.copy)
        writer.copy.truncate()
    writer.do(functools.partial(_write, writer.copy, final), final)
    observed.note("checkpoint", path=final, bytes=num_bytes, seconds=time.perf_counter() - start, in_background=True)


def afterwards(function: Callable[..., Any], *args: Any) -> None:
    """Call `function(*args)` after all background saves, in their thread; if none is pending, now and here. Local.

    It is not called if a save failed.
    """
    if (writer := _busy()) is not None:
        writer.do(functools.partial(function, *args), f"{getattr(function, '__name__', function)}{args}")
    else:
        function(*args)


def flush() -> None:
    """Wait until all background saves are on disk. Local.

    Raises CheckpointError if a file could not be written; the old one is unchanged.
    """
    if (writer := _busy()) is not None:
        with outside_steps():
            writer.wait()


def copy(source: PathLike, path: PathLike) -> None:
    """Copy the file `source` to `path`, in the way of :func:`save`. Local.

    If background saves are pending, their thread copies after them, and this does not wait. On the main rank it raises
    FileNotFoundError if `source` does not exist, and CheckpointError as `save`; from the thread, a later call does.
    """
    if world().is_main:
        afterwards(_copy, os.path.abspath(source), os.path.abspath(path))


@contextlib.contextmanager
def whole(path: PathLike, tell: Callable[[str], None] = lambda folder: None) -> Iterator[PathLike]:
    """Yield where to write the checkpoint `path`: `written`, but a pipe or a device is written as it is. Local."""
    if os.path.exists(path) and not os.path.isfile(path):
        yield path
        return
    start, final = time.perf_counter(), os.path.abspath(path)
    with outside_steps(), written(path, tell) as partial:
        yield partial
        num_bytes = os.stat(partial).st_size  # not of `path`, which another job may replace or remove
    observed.note("checkpoint", path=final, bytes=num_bytes, seconds=time.perf_counter() - start, in_background=False)


@contextlib.contextmanager
def written(path: PathLike, tell: Callable[[str], None] = lambda folder: None) -> Iterator[str]:
    """Yield a temporary file's name, which is moved to `path` after the block, or removed after an error. Local.

    It has the name of `path`, which torch.save writes into the file, in a hidden folder `.NAME.*.partial`. `tell` is
    called with that folder before it exists. A killed process leaves it; the next write of `path` removes it, but not
    that of a process which still runs: another job. Raises CheckpointError if this file, or an earlier one in the
    background, could not be written.
    """
    flush()
    final = os.fspath(path)
    folder, name = os.path.split(os.path.realpath(final))
    own = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}")
    partial = os.path.join(own, name)
    try:
        for left in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*{_PARTIAL}")):
            if not os.path.exists(f"/proc/{left.rsplit('.', 2)[1].partition('-')[0]}"):
                shutil.rmtree(left, ignore_errors=True)
        tell(own)
        os.mkdir(own)
        yield partial
        _flush(partial, os.O_RDWR)
        os.replace(partial, os.path.join(folder, name))
    except BaseException as error:
        is_of_torch = isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_TORCHS_WRITER)
        if isinstance(error, CheckpointError) or not (is_of_torch or isinstance(error, OSError)):
            raise
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        if os.path.isdir(folder) and not os.path.isdir(own):
            raise CheckpointError(
                f"{final} could not be written ({said}): another job, which saves to the same path, has removed the "
                "unfinished file; one would overwrite the checkpoints of the other. Give each job a folder of its own."
            ) from error
        has = f"{shutil.disk_usage(folder).free:,} bytes free" if os.path.isdir(folder) else "no such directory"
        raise CheckpointError(
            f"{final} could not be written ({said}, {has}); this state would be lost; the previous file is unchanged. "
            "Make room, or save to a writable directory."
        ) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
    # Otherwise a power cut may undo the rename. Some file systems cannot sync a folder; the file is in place anyway.
    with contextlib.suppress(OSError):
        _flush(folder, os.O_RDONLY)


def keep_newest(folder: PathLike, pattern: str, num_kept: int) -> list[Path]:
    """Remove all files of `folder` that match `pattern` except the newest `num_kept`; return those removed. Local.

    The main rank removes; on other ranks the list is empty. Raises CheckpointError if `num_kept` is below 1: nothing
    would be left to resume from.
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
    """Return the newest intact file of `folder` that matches `pattern`, or None. Local.

    The newest is the one that was written last, whatever number is in its name. Truncated or damaged files are skipped
    with a warning. Ranks may see different files while a shared disk is written to: use
    `world.run_on_main(find_latest, folder, pattern)`.
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
    """Return what is wrong with a file that `torch.save` wrote, or None. Local.

    Reads it once and compares its checksums, which `torch.load` does not. Runs no code from the file.
    """
    if not os.path.isfile(path):
        return "not a regular file"  # opening a pipe would block
    try:
        with zipfile.ZipFile(path) as file:
            bad, names = file.testzip(), file.namelist()
    except Exception as error:  # from zipfile, struct, zlib or a name's encoding
        return f"{type(error).__name__}: {error}"
    if bad is not None:
        return f"its part {bad} does not match its checksum"
    return None if any(name.endswith("data.pkl") for name in names) else "it is not one of torch's files"


class Background:
    """A thread that writes what one job of ranks saves, call by call, and the memory of the object that it writes.

    `cleanup()` and the end of the program wait for it. If a call fails, later ones are left out, until `wait` has
    raised that.
    """

    def __init__(self) -> None:
        self._process, self._thread_id = os.getpid(), 0
        self.pending: list[tuple[Future[None], str]] = []  # calls and what they do, until `wait` has seen their ends
        self._thread = ThreadPoolExecutor(1, "ddpshim-saves", self._begin)
        self.copy = io.BytesIO()
        current().at_end.callback(_at_cleanup)

    def is_here(self) -> bool:
        """Return whether this process made it (a fork has no thread), and this is not its thread."""
        return self._process == os.getpid() and self._thread_id != threading.get_ident()

    def do(self, call: Callable[[], Any], what: str) -> None:
        """Submit `call`, which runs after the earlier ones if they all succeed; `what` names it in errors."""
        self.pending.append((self._thread.submit(self._run, call), what))
        atexit.unregister(_at_exit)  # so that it runs before the exit handlers that the program has by now
        atexit.register(_at_exit)

    def wait(self, timeout_s: Optional[float] = None) -> None:
        """Wait for all calls, at most `timeout_s`. Raises CheckpointError if one failed; none is pending then."""
        if wait([call for call, _ in self.pending], timeout_s).not_done:
            return
        ended, self.pending = self.pending, []
        for number, (call, _) in enumerate(ended):
            if (error := call.exception()) is not None:
                said = str(error) if isinstance(error, CheckpointError) else described(error)
                left_out = ", ".join(what for _, what in ended[number + 1 :])
                raise CheckpointError(f"{said} Left out because of it: {left_out}." if left_out else said)

    def _begin(self) -> None:
        self._thread_id = threading.get_ident()
        if sys.platform == "linux":  # elsewhere it would be the whole process's
            os.nice(_NICE)  # training must not wait for a core

    def _run(self, call: Callable[[], Any]) -> None:
        if not any(earlier.done() and earlier.exception() for earlier, _ in self.pending):
            call()


def _busy() -> Optional[Background]:
    """Return the thread if saves are pending, or one failed and this was not raised yet; else None."""
    writer = current().part(Background)
    return writer if writer.pending and writer.is_here() else None


def _is_for_the_background(num_bytes: int, path: PathLike) -> bool:
    """Whether to save in the background: not if `save` is faster, or would raise an expected error earlier."""
    if num_bytes < _LEAST_BYTES:
        return False
    from ddpshim.process import machine

    writer, folder = current().part(Background), os.path.dirname(os.path.realpath(path))
    more = num_bytes - writer.copy.getbuffer().nbytes
    return writer.is_here() and (
        2 * more <= (machine.memory().available_bytes or 0)
        and os.access(folder, os.W_OK)
        and shutil.disk_usage(folder).free > num_bytes
    )


def _write(copy: io.BytesIO, path: str) -> None:
    # Not Path.write_bytes: a kept error would hold its view of the memory, which the next save resizes.
    with written(path) as partial, copy.getbuffer() as content, open(partial, "wb") as file:
        file.write(content)


def _copy(source: PathLike, path: PathLike) -> None:
    os.stat(source)  # raises FileNotFoundError
    with written(path) as partial:
        shutil.copyfile(source, partial)


def _at_cleanup() -> None:
    """Wait for pending saves; at most 5 s if this rank fails, because its launcher then ends it."""
    failing = failure.on_the_way_out()
    try:
        if (writer := _busy()) is not None:
            writer.wait(_FAILING_DEADLINE_S if failing else None)
    except CheckpointError as error:
        if not failing:
            raise
        say(str(error), directly=True)


def _at_exit() -> None:
    """Wait for pending saves; abort after an error: if it were raised here, the exit code would be 0."""
    try:
        flush()
    except CheckpointError as error:
        if threading.current_thread() is threading.main_thread():
            failure.abort(error)
        say(str(error), directly=True)  # `abort` calls this in a thread


def _flush(path: str, flags: int) -> None:
    """Sync `path` to disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _newest_first(folder: PathLike, pattern: str) -> list[Path]:
    found = [p for p in Path(folder).glob(pattern) if p.is_file() and not p.is_symlink()]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path), reverse=True)


def _num_bytes(obj: Any) -> int:
    """Return the bytes of the tensors in nested dictionaries, lists and tuples; each storage counts once."""
    from torch.utils._pytree import tree_flatten

    found = [value for value in tree_flatten(obj)[0] if isinstance(value, torch.Tensor)]
    storages = [value.untyped_storage() for value in found if value.layout == torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
