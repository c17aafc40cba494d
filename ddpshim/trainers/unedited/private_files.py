"""Lets only the main rank write, and play the rollouts of some codebases, in a program for one process.

Files that another rank opens for writing, makes, removes, moves or links go to a private temporary folder that only
this rank sees, on top of the files that existed when the job began. See docs/same_experiment.md.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, TypeVar

import torch

from ddpshim.job.world import World
from ddpshim.process.job import current
from ddpshim.process.observed import called
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.replaced import after_import, replaced
from ddpshim.rows.gradients import plain
from ddpshim.rows.tensor import Counts
from ddpshim.trainers.unedited.children import watch_child
from ddpshim.trainers.unedited.file_calls import CLibraries, LeftAlone, in_place, seen_by, watched
from ddpshim.trainers.unedited.main_file_log import MainsChanges, MainsSaves, MainsWrites

if TYPE_CHECKING:
    from ddpshim.trainers.unedited.file_overlay import Files

T = TypeVar("T")


class PrivateFiles:
    """Replaces `open`, functions of os, `torch.save` and `torch.load`. Local.

    Ranks wait only to read checkpoints, which the main rank alone writes. Files that a dataset saves for its samples
    (while a loader produces a batch, and in data workers) are each rank's own, even if torch.save writes them.
    """

    def __init__(self, world: World, started: float) -> None:
        """`started`: time before the ranks of this `world` met, by the clock of the file system."""
        self._world, self._counts = world, current().part(Counts)
        self._process = os.getpid()
        self._save, self._load = torch.save, torch.load
        self._saves = MainsSaves(world)
        self.changes = MainsChanges(world, started)
        self._left = LeftAlone()
        self._files: Optional[Files] = None  # of a rank that is not main

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within this block, the program's calls use the stand-ins; afterwards private files are removed."""
        with contextlib.ExitStack() as undo:
            if self._world.is_main:
                _share_loggers(self._world)
                writes = MainsWrites(self.changes, self._saves, self._left)
                libraries, stand_ins = seen_by(writes.see), writes.stand_ins()
                undo.enter_context(watched(writes.see))
            else:
                from ddpshim.trainers.unedited.file_overlay import Files, View

                view = View(self.changes, self._saves)
                self._files = Files(view, self._left)
                libraries = CLibraries(self._files.place_to_read, self._files.place_to_write)
                stand_ins = self._files.stand_ins()
                undo.callback(view.remove_all)  # when Python's own functions are back
                atexit.register(undo.close)  # a rank that fails ends without leaving this block
                undo.callback(atexit.unregister, undo.close)
                undo.callback(os.chdir, os.getcwd())
                # Otherwise shutil.rmtree refuses a folder that the main rank removes after its lstat: it then opens
                # a copy with another inode.
                undo.enter_context(replaced(shutil, "_use_fd_functions", False))
                undo.enter_context(watched(self._files.refuse))
                switch_loggers_off(self._world)
            stand_ins |= {id(self._save): self.save, id(self._load): self.load}
            undo.enter_context(inherited(self._files))
            undo.enter_context(libraries.installed())
            undo.enter_context(in_place(stand_ins))
            yield

    def see_what_is_shared(self) -> None:
        """Show this rank what the main rank has made for all ranks so far."""
        if self._files is not None:
            self._files.view.see_what_is_shared()

    def shown_to_all(self, run: Callable[[], T]) -> T:
        """Return the result of `run` on the main rank; files that its processes change are shown to all ranks."""
        before = self.changes.states()
        result = run()
        after = self.changes.states()
        with self.changes.apart():
            for path in sorted(before.keys() | after.keys()):
                if before.get(path) != after.get(path):
                    self.changes.tell(path)
        return result

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """torch.save; to a path or an open file only on the main rank. A file at a path is complete or absent."""
        path, obj = self._path_of(f), plain(obj)
        if path is None:
            if self._files is not None and isinstance(f, (str, os.PathLike)):
                f = self._files.place_to_write(f)
            self._save(obj, f, *args, **kwargs)
            return
        if self._files is not None:
            self._files.view.leave_to_main(path)
            return
        with self._counts.alone():
            if isinstance(f, (str, os.PathLike)):
                self.changes.tell(path)
                from ddpshim.checkpoint import files as checkpoint

                with checkpoint.whole(path, self.changes.tell) as partial:
                    self._save(obj, partial, *args, **kwargs)
            else:
                self._save(obj, f, *args, **kwargs)
                f.flush()
        self._saves.note(path)

    def load(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        """torch.load; if the program has saved to the path, waits until the main rank has written the file."""
        if self._files is not None and isinstance(f, (str, os.PathLike)):
            f = self._files.place_to_read(f)
        return self._load(f, *args, **kwargs)

    def _path_of(self, f: Any) -> Optional[str]:
        """Return the path of the checkpoint that all ranks save to `f`; None if each rank saves its own file."""
        # Another thread may save a checkpoint while the main one fetches a batch.
        is_a_datasets = self._counts.is_fetching and threading.current_thread() is threading.main_thread()
        if os.getpid() != self._process or is_a_datasets:
            return None
        if not isinstance(f, (str, os.PathLike)):
            is_file = isinstance(f, io.BufferedWriter) and isinstance(f.name, (str, bytes, os.PathLike))
            if not is_file or not f.writable():
                return None
            f = f.name
        path = os.path.abspath(os.fsdecode(f))
        path = os.path.realpath(path) if self._files is None else self._files.view.find(path)
        is_other = self._left.has(path) or (os.path.exists(path) and not os.path.isfile(path))  # a pipe, a device
        return None if is_other and path not in self._saves else path


def switch_loggers_off(world: Optional[World] = None) -> None:
    """Disable loggers that use a server: each rank, and each run of a proof (no `world`), would create a run there."""
    switches = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "MLFLOW_TRACKING_URI": "file:./mlruns"}
    switches["TRACKIO_DIR"] = os.path.join(tempfile.gettempdir(), f"ddpshim-trackio-{os.getpid()}")
    atexit.register(shutil.rmtree, switches["TRACKIO_DIR"], ignore_errors=True)
    os.environ.update({**switches, "CLEARML_OFFLINE_MODE": "1", "SWANLAB_MODE": "disabled"})
    _share_loggers(world)


def _share_loggers(world: Optional[World]) -> None:
    """Have `loggers` change W&B and Trackio once the program has imported them. Local."""

    def share(name: str) -> None:
        from ddpshim.trainers.unedited import loggers

        getattr(loggers, f"share_{name}")(world)

    for name in ("wandb", "trackio"):
        after_import(name, functools.partial(share, name))


class _Passed(NamedTuple):
    """In the process that unpickles it, `files` are seen while that process lives, and it must not train."""

    files: Optional[Files]
    process: int

    def __reduce__(self) -> Any:  # the main rank's files are those of the disk
        return (watch_child, (self.process,)) if self.files is None else (_in_child, (*self,))


def _in_child(files: Files, process: int) -> contextlib.ExitStack:
    watch_child(process)
    until = contextlib.ExitStack()
    until.enter_context(in_place(files.stand_ins()))
    until.enter_context(CLibraries(files.place_to_read, files.place_to_write).installed())
    return until


def inherited(files: Optional[Files]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new child processes see `files`, and end this rank if they train."""
    passed = _Passed(files, os.getpid())
    init = called(BaseProcess.__init__, after=lambda process, _: setattr(process, "ddpshim_files", passed))
    return replaced(BaseProcess, "__init__", init)


def rollouts_on_main(base: Any, world: World, files: PrivateFiles) -> Any:
    """Return the `__init_subclass__` of `base` by which the main rank alone makes, and plays, what its subclasses do.

    Other ranks get what their `run` found there. Otherwise each rank would need as many simulators as one process, and
    would decide differently if one of them is not deterministic.
    """
    counts = current().part(Counts)

    def playing(method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the stand-in for `run`, and what is left of `__init__`."""

        @functools.wraps(method)
        def play(runner: Any, *args: Any, **kwargs: Any) -> Any:
            if not counts.is_in_lock_step():  # this rank alone makes the call, or plays already
                return method(runner, *args, **kwargs)
            own, device = [], world.device

            def alone() -> Any:
                with counts.alone():
                    own.append(method(runner, *args, **kwargs))
                return _portable(own[0]), rank_states(device)

            with files.changes.apart():
                found, states = world.run_on_main(alone)
            files.see_what_is_shared()
            if not world.is_main:
                restore_rank_states(states, device)
            return own[0] if own else found

        return play

    def making(method: Callable[..., None]) -> Callable[..., None]:
        """Return the stand-in for `__init__`. Other ranks run only that of the base, so they make no environments."""
        play = playing(method)

        @functools.wraps(method)
        def make(runner: Any, *args: Any, **kwargs: Any) -> None:
            if counts.is_in_lock_step() and not world.is_main:
                given = {**kwargs, **inspect.signature(method).bind(runner, *args, **kwargs).arguments}
                names = [name for name in [*inspect.signature(base.__init__).parameters][1:] if name in given]
                base.__init__(runner, **{name: given[name] for name in names})
            play(runner, *args, **kwargs)

        return make

    def made(kind: Any, /, **arguments: Any) -> None:
        super(base, kind).__init_subclass__(**arguments)
        for name, instead in (("__init__", making), ("run", playing)):
            method = getattr(kind, name)
            if not hasattr(method, "is_on_main"):
                setattr(kind, name, instead(method))
                getattr(kind, name).is_on_main = True

    return classmethod(made)


def _portable(value: Any) -> Any:
    """Return `value` with only numbers, text, tensors and arrays; None replaces others, such as a video to log."""
    if isinstance(value, Mapping):
        return {key: _portable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(_portable, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value).__module__ in ("numpy", "torch"):
        return value.item() if not getattr(value, "shape", (1,)) else value
    return None
