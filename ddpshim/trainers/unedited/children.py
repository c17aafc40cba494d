"""Gives a rank's view of the files to the processes that it starts afresh: data workers by spawn or forkserver.

Forked ones have it by themselves.
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
    """Puts `files` in the place of Python's functions in the process in which it is unpickled."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        in_place(self.files.stand_ins()).__enter__()
        CLibraries(self.files.place_to_read, self.files.place_to_write).install()


@contextlib.contextmanager
def inherited(files: Files) -> Iterator[None]:
    """In this block processes that are made see `files`."""
    passed, made = _Passed(files), BaseProcess.__init__

    def init(process: BaseProcess, *args: Any, **kwargs: Any) -> None:
        made(process, *args, **kwargs)
        process._ddpshim_files = passed  # type: ignore[attr-defined]

    with replaced(BaseProcess, "__init__", init):
        yield
