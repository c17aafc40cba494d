"""Records what each rank of an audited job does: steps, batches, random streams and files, as JSON lines.

The program computes what it would compute alone: tensors and generators are read, nothing is drawn or sent, and nobody
is waited for before the last step that was asked for. Imports no torch before the program does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import multiprocessing
import os
import signal
import sys
import sysconfig
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Optional

from ddpshim.job.after_import import after_import
from ddpshim.job.replaced import replaced
from ddpshim.tools.audit.fingerprints import checksums, samples_of, streams

SHOW_STACK: Optional[int] = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None

_MAX_SAMPLES = 100_000  # of one pass are told apart
SETTINGS = "settings.json"  # what ranks read theirs from
_HERE = str(Path(__file__).absolute().parents[2])  # of ddpshim
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Settings:
    """How much is looked at, and how long ranks are waited for."""

    steps: int = 20  # of each optimizer
    to_end: bool = False  # the program ends by itself, not after these steps
    timeout_s: float = 300.0


@contextlib.contextmanager
def recorded(folder: str) -> Iterator[None]:
    """In it, a program that runs is written down in `folder`, and how it ended. Local."""
    recorder = Witness(Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    recorder.install()
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        recorder.end(code)


class Witness:
    """Writes down what this process does; its forked children are left alone. Python asks it where torch is."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._settings = Settings(**json.loads((folder / SETTINGS).read_text()))
        self._process, self._cwd = os.getpid(), os.getcwd()
        # Not asked of tempfile when a file is opened: it may be the one that opens it, and holds a lock.
        temporary = (str(folder.parent), "/tmp", "/var/tmp", "/dev", "/proc", "/sys")
        self._elsewhere = (*temporary, os.path.expanduser("~/."), sys.prefix, *_LIBRARIES)
        self._file = os.open(folder / f"rank_{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._optimizers: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._named: dict[int, Parameters] = {}
        self._stepping: Any = None  # the outermost optimizer whose step this is
        self._passes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # number, samples
        self._num_passes = 0
        self._has_ended_pass = False  # since the last step
        self._files: set[tuple[str, str]] = set()
        self._is_over = False
        self._undo = contextlib.ExitStack()

    def install(self) -> None:
        """From here on the program is looked at, and torch when it is imported."""
        if SHOW_STACK is not None:
            self._stacks = open(self._folder / f"stack_{self._rank}", "w")  # noqa: SIM115
            faulthandler.register(SHOW_STACK, self._stacks, all_threads=True)
        self.write("start", pid=self._process)
        after_import("torch", self._watch_torch)
        sys.addaudithook(self._see_event)

    def end(self, code: int) -> None:
        """The program is over, with this exit code."""
        self.write("end", code=code)
        self._is_over = True
        self._undo.close()
        self._tell_over()
        # Where a DistributedDataParallel is the last to hold its group, torch (seen with 2.13) waits for gloo's threads
        # and holds Python's lock, for which one of them may wait to let go of its last message: a trainer that is done
        # would now and then be called stalled. Now none is.
        if self._named:
            from ddpshim.job.group import ENDS_THREADS

            if ENDS_THREADS:
                self._named.clear()

    def write(self, kind: str, **values: Any) -> None:
        """One record; whole, or not at all, whatever ends this process."""
        if os.getpid() == self._process:
            os.write(self._file, (json.dumps({"kind": kind, **values}) + "\n").encode())

    def _watch_torch(self) -> None:
        import torch
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)
        begin, advance, save = dataloader.DataLoader.__iter__, dataloader._BaseDataLoaderIter.__next__, torch.save

        @functools.wraps(begin)
        def begin_and_tell(loader: Any) -> Any:
            batches = begin(loader)
            self._see_pass(loader, batches)
            return batches

        @functools.wraps(advance)
        def advance_and_tell(batches: Any) -> Any:
            try:
                batch = advance(batches)
            except StopIteration:
                self._has_ended_pass = True
                if batches in self._passes:
                    self.write("pass ended", number=self._passes[batches][0])
                raise
            self._see_batch(batches, batch)
            return batch

        @functools.wraps(save)
        def save_and_tell(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            self._see_file("write", f)  # C++ opens the file
            save(obj, f, *args, **kwargs)

        self._undo.enter_context(replaced(dataloader.DataLoader, "__iter__", begin_and_tell))
        self._undo.enter_context(replaced(dataloader._BaseDataLoaderIter, "__next__", advance_and_tell))
        for module in (torch, torch.serialization):
            self._undo.enter_context(replaced(module, "save", save_and_tell))

    # Data

    def _see_pass(self, loader: Any, batches: Any) -> None:
        from torch.utils.data import DistributedSampler, IterableDataset

        self._num_passes += 1
        self._passes[batches] = [self._num_passes, 0]
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        is_distributed = isinstance(sampler, DistributedSampler)
        self.write(
            "pass",
            number=self._num_passes,
            data=id(loader.dataset),
            is_iterable=isinstance(loader.dataset, IterableDataset),
            sampler=type(sampler).__name__,
            shuffles=sampler.shuffle if is_distributed else None,
            epoch=sampler.epoch if type(sampler) is DistributedSampler else None,  # others may advance by themselves
            place=place(),
        )

    def _see_batch(self, batches: Any, batch: Any) -> None:
        seen = self._passes.get(batches)
        if seen is None:
            return
        size, samples = samples_of(batch)
        seen[1] += size
        told = samples if seen[1] <= _MAX_SAMPLES else None
        self.write("batch", number=seen[0], size=size, samples=told, streams=streams())

    # Steps

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # An optimizer may have another one inside, which holds a part of the parameters (ZeroRedundancyOptimizer).
        self._stepping = optimizer if self._stepping is None else self._stepping

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping is not optimizer or os.getpid() != self._process:
            return
        self._stepping = None
        number, count = self._optimizers.get(optimizer, (len(self._optimizers), 0))
        count += 1
        self._optimizers[optimizer] = (number, count)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        is_looked_at = count <= self._settings.steps or self._has_ended_pass
        about = self._look_at(number, params) if is_looked_at else {}
        self._has_ended_pass = False
        lr = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.write("step", optimizer=number, step=count, type=type(optimizer).__name__, lr=lr, place=place(), **about)
        if count == self._settings.steps and not self._settings.to_end:
            self._stop()

    def _look_at(self, number: int, params: Sequence[Any]) -> dict[str, Any]:
        import torch.distributed as dist

        known = self._named.get(number)
        if known is None or len(known.names) != len(params):
            known = self._named[number] = Parameters(params)
            self.write("optimizer", optimizer=number, names=known.names, is_wrapped=known.is_wrapped)
        return {
            "values": checksums(params),
            "gradients": checksums([p.grad for p in params]),
            "buffers": dict(zip(known.buffers, checksums(list(known.buffers.values())))),
            "streams": streams(),
            "group_size": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0,
        }

    def _stop(self) -> None:
        """End this process when its peers have made as many steps; what it would do next is not to happen."""
        self.write("stopped")
        self._tell_over()
        end_with_peers(self._folder, self._world_size, self._settings.timeout_s)

    def _tell_over(self) -> None:
        (self._folder / f"over_{self._rank}").touch()

    # Files

    def _see_event(self, event: str, args: Any) -> None:
        if event == "open":
            path, mode, flags = args
            if isinstance(mode, str):
                what = "append" if "a" in mode else "write" if set(mode) & set("wx+") else ""
            else:
                changes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
                what = ("append" if flags & os.O_APPEND else "write") if changes else ""
            if what:
                self._see_file(what, path)
        elif event == "shutil.rmtree" or (event in ("os.remove", "os.rmdir") and args[1] == -1):
            self._see_file("delete", args[0])  # by its path, not by a name in an open folder, as rmtree goes on
        elif event == "os.mkdir":
            self._see_file("mkdir", args[0])
        elif event == "os.rename":
            self._see_file("write", args[1])

    def _see_file(self, what: str, path: Any) -> None:
        if self._is_over or os.getpid() != self._process or not isinstance(path, (str, bytes, os.PathLike)):
            return
        found = os.path.abspath(os.fsdecode(path))
        if (what, found) not in self._files and self._is_shared(found):
            self._files.add((what, found))
            near = os.path.relpath(found, self._cwd)
            self.write("file", what=what, path=found if near.startswith("..") else near, place=place())

    def _is_shared(self, path: str) -> bool:
        """Whether ranks would get into each other's way at this file."""
        if "__pycache__" in path or "ddpshim-logs" in path or path.endswith(".lock"):
            return False
        return path.startswith(self._cwd + os.sep) or not path.startswith(self._elsewhere)


def end_with_peers(folder: Path, num: int, timeout_s: float) -> NoReturn:
    """End this process, and its data workers, when so many files in `folder` say that a process is over."""
    end = time.monotonic() + timeout_s
    # A peer may still be receiving the last gradients from this one.
    while len(list(folder.glob("over_*"))) < num and time.monotonic() < end:
        time.sleep(0.02)
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises where a data worker is killed
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Parameters:
    """The names of an optimizer's parameters, which of them DistributedDataParallel has, and its networks' buffers."""

    def __init__(self, params: Sequence[Any]) -> None:
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        found = (o for o in gc.get_objects() if issubclass(type(o), nn.Module))
        modules = [module for module in found if "_modules" in vars(module)]  # else it is only being made
        mine = {id(p) for p in params}
        wrapped: set[int] = set()
        named: list[tuple[str, Any]] = []
        buffers: list[tuple[str, Any]] = []
        self.groups: list[Any] = []  # held until the program is over
        for module in modules:
            inside = [(name, p) for name, p in module.named_parameters() if id(p) in mine]
            if isinstance(module, DistributedDataParallel):
                self.groups.append(module.process_group)
                wrapped.update(id(p) for _, p in inside)
            elif inside:
                named += inside
                buffers += module.named_buffers()
        names = _outermost(named)
        kept = _outermost(buffers)
        self.buffers = {kept[id(b)]: b for _, b in buffers}
        self.names = [names.get(id(p), "") for p in params]
        self.is_wrapped = [id(p) in wrapped for p in params]


def _outermost(named: Sequence[tuple[str, Any]]) -> dict[int, str]:
    """The longest name of each, which is that in the outermost module; by id."""
    return {id(tensor): name for name, tensor in sorted(named, key=lambda item: len(item[0]))}


def place() -> str:
    """The file and line of the program that came here; empty where none of it is in the stack."""
    package = (getattr(sys.modules.get("__main__"), "__package__", None) or "").partition(".")[0]
    stack = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1)))
    return next((shown(name, line) for name, line in stack if is_program(name, package)), "")


def shown(file: str, line: object) -> str:
    """A place as it is told: from the working folder, where the file is below it."""
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}:{line}"


def is_program(file: str, package: str) -> bool:
    """Whether this file of Python is the user's: of the `package` that is run with -m, or else of no library."""
    is_library = file.startswith(("<", _HERE + os.sep, *_LIBRARIES))
    return f"{os.sep}{package}{os.sep}" in file if package and is_library else not is_library
