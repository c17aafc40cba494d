"""Files that are whole or absent: written once, by the main rank, beside their place and moved into it when complete.

The decision when to save is the caller's, and so is the content: the keys of a wrapped network are the bare network's.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Union

import torch

from ddpshim.errors import CheckpointError
from ddpshim.group import world

PathLike = Union[str, "os.PathLike[str]"]
_PARTIAL = ".partial"
_DISK_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
}


def save(obj: Any, path: PathLike) -> None:
    """`obj` in the file `path`, for `torch.load`. Written by the main rank; local: nobody waits for it.

    Whatever happens, `path` is at any moment the file that it was or the new one. The same with one process.

    Raises:
        CheckpointError: on the main rank, the file could not be written; the old one is as it was.
    """
    if world().is_main:
        with written(path, num_bytes=_num_bytes(obj)) as partial:
            torch.save(obj, str(partial))


def copy(source: PathLike, path: PathLike) -> None:
    """The content of `source` in the file `path`, in the way of :func:`save`. Local.

    Raises:
        FileNotFoundError: on the main rank, there is no `source`.
        CheckpointError: on the main rank, as for `save`.
    """
    if world().is_main:
        num_bytes = os.stat(source).st_size
        with written(path, num_bytes) as partial:
            shutil.copyfile(source, partial)


@contextlib.contextmanager
def written(path: PathLike, num_bytes: Optional[int] = None) -> Iterator[str]:
    """The name of a file to write: when the block ends it is moved to `path`, after an error removed. Local.

    The name prints as `path` (in `format` and f-strings), so that code which reports where it saved to stays right.
    A process that is killed leaves a hidden `.NAME.*.partial`, which the next write of `path` removes.

    Args:
        path: where the file will be.
        num_bytes: how much will be written, for the error's text.

    Raises:
        CheckpointError: the file could not be written.
    """
    final = os.fspath(path)
    folder, name = os.path.split(os.path.realpath(final))
    partial = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}")
    try:
        for left in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*{_PARTIAL}")):
            os.unlink(left)
        yield _Name(partial, final)
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
    removed = _newest_first(folder, pattern)[num_kept:]
    for path in removed:
        path.unlink()
    return removed


def find_latest(folder: PathLike, pattern: str) -> Optional[Path]:
    """The newest file of `folder` that matches `pattern` and is whole; None where there is none. Local.

    Files that are truncated or damaged are passed over, with a warning. Several ranks may see different files
    on a shared disk that is written to: `world.run_on_main(find_latest, folder, pattern)` decides once.
    """
    for path in _newest_first(folder, pattern):
        damage = find_damage(path)
        if damage is None:
            return path
        warnings.warn(
            f"checkpoint {path} is damaged ({damage}) and was passed over; the one before it is used, if any. "
            "Remove it.",
            stacklevel=2,
        )
    return None


def find_damage(path: PathLike) -> Optional[str]:
    """What is wrong with a file that `torch.save` wrote, or None. Local.

    Reads it once against the checksums in it, which `torch.load` does not compare; runs nothing of what it holds.
    """
    try:
        with zipfile.ZipFile(path) as file:
            bad = file.testzip()
            names = file.namelist()
    except (OSError, EOFError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    if bad is not None:
        return f"its part {bad} does not match its checksum"
    return None if any(name.endswith("data.pkl") for name in names) else "it is not one of torch's files"


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
    found = [(path.stat().st_mtime_ns, path) for path in Path(folder).glob(pattern) if path.is_file()]
    return [path for _, path in sorted(found, reverse=True) if not path.name.endswith(_PARTIAL)]


def _is_about_the_disk(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _DISK_ERRORS
    # torch's own writer, which raises nothing more telling.
    from_torch = ("PytorchStreamWriter", "inline_container", "Parent directory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in from_torch)


def _describe(error: BaseException, final: str, folder: str, num_bytes: Optional[int]) -> str:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    needed = "" if num_bytes is None else f", {num_bytes:,} bytes needed"
    try:
        needed += f", {shutil.disk_usage(folder).free:,} bytes free"
    except OSError:
        needed += ", no such directory"
    return (
        f"{final} could not be written ({said}{needed}); this state would be lost, what was there before is as it was. "
        "Make room, or save to a directory that can be written to."
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
