"""Gives a rank's view of the files to its child processes that start by spawn or forkserver, such as data workers.

Forked processes inherit it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from ddpshim.job.replaced import replaced
from ddpshim.trainers.unedited.c_libraries import CLibraries
from ddpshim.trainers.unedited.holders import in_place
from ddpshim.trainers.unedited.stand_ins import Files


class _Passed:
    """Replaces Python's functions by those of `files` in the process that unpickles it, while that process lives."""

    def __init__(self, files: Files) -> None:
        self.files, self.until = files, contextlib.ExitStack()

    def __getstate__(self) -> Files:
        return self.files

    def __setstate__(self, files: Files) -> None:
        self.__init__(files)  # type: ignore[misc]
        self.until.enter_context(in_place(files.stand_ins()))
        self.until.callback(CLibraries(files.place_to_read, files.place_to_write).install())


@contextlib.contextmanager
def inherited(files: Files) -> Iterator[None]:
    """Within this block, new child processes see `files`."""
    passed, made = _Passed(files), BaseProcess.__init__

    def init(process: BaseProcess, *args: Any, **kwargs: Any) -> None:
        made(process, *args, **kwargs)
        process.ddpshim_files = passed  # type: ignore[attr-defined]

    with replaced(BaseProcess, "__init__", init):
        yield
