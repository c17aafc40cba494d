"""Records what each rank of an audited job does: steps, batches, random streams and files, as JSON lines.

Recording does not change the program's results: it reads tensors and generators, draws and sends nothing, and waits for
no other rank before the last requested step. Imports torch only after the program does.
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

_MAX_SAMPLES = 100_000  # hashes of later samples of a pass are not recorded
SETTINGS = "settings.json"  # ranks read their Settings from it
_HERE = str(Path(__file__).absolute().parents[2])  # the folder of the package ddpshim
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Settings:
    """How many steps are recorded, and how long to wait for ranks."""

    steps: int = 20  # of each optimizer
    to_end: bool = False  # let the program run to its end instead of stopping it after these steps
    timeout_s: float = 300.0


@contextlib.contextmanager
def recorded(folder: str) -> Iterator[None]:
    """Within this block, record the program and its exit code in `folder`. Local."""
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
    """Records what this process does, but not its forked children."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._settings = Settings(**json.loads((folder / SETTINGS).read_text()))
        self._process, self._cwd = os.getpid(), os.getcwd()
        # tempfile.gettempdir() must not be called while a file is opened: tempfile may be opening it and hold its lock.
        temporary = (str(folder.parent), "/tmp", "/var/tmp", "/dev", "/proc", "/sys")
        self._elsewhere = (*temporary, os.path.expanduser("~/."), sys.prefix, *_LIBRARIES)
        self._file = os.open(folder / f"rank_{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._optimizers: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._named: dict[int, Parameters] = {}
        self._stepping: Any = None  # the outermost optimizer that is in its step
        self._passes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # number, samples
        self._num_passes = 0
        self._has_ended_pass = False  # since the last step
        self._files: set[tuple[str, str]] = set()
        self._is_over = False
        self._undo = contextlib.ExitStack()

    def install(self) -> None:
        """Start recording; torch is recorded as soon as the program has imported it."""
        if SHOW_STACK is not None:
            self._stacks = open(self._folder / f"stack_{self._rank}", "w")  # noqa: SIM115
            faulthandler.register(SHOW_STACK, self._stacks, all_threads=True)
        self.write("start", pid=self._process)
        after_import("torch", self._watch_torch)
        sys.addaudithook(self._see_event)

    def end(self, code: int) -> None:
        """Record the exit code and stop recording."""
        self.write("end", code=code)
        self._is_over = True
        self._undo.close()
        self._mark_over()
        # If a DistributedDataParallel object is the last owner of its process group, torch (seen with 2.13) joins
        # gloo's threads while it holds the GIL, and one of them may need the GIL to free its last message. Sometimes
        # this deadlocks, and a finished trainer would be reported as stalled. So `Parameters` holds the groups until
        # here, and with a torch that does not end its threads (ENDS_THREADS) for ever.
        if self._named:
            from ddpshim.job.process_group import ENDS_THREADS

            if ENDS_THREADS:
                self._named.clear()

    def write(self, kind: str, **values: Any) -> None:
        """Append one record. It is complete or missing, even if the process is killed."""
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
        def begin_and_record(loader: Any) -> Any:
            batches = begin(loader)
            self._see_pass(loader, batches)
            return batches

        @functools.wraps(advance)
        def advance_and_record(batches: Any) -> Any:
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
        def save_and_record(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            self._see_file("write", f)  # C++ opens the file, which `_see_event` does not see
            save(obj, f, *args, **kwargs)

        self._undo.enter_context(replaced(dataloader.DataLoader, "__iter__", begin_and_record))
        self._undo.enter_context(replaced(dataloader._BaseDataLoaderIter, "__next__", advance_and_record))
        for module in (torch, torch.serialization):
            self._undo.enter_context(replaced(module, "save", save_and_record))

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
            epoch=sampler.epoch if type(sampler) is DistributedSampler else None,  # subclasses may change it themselves
            place=place(),
        )

    def _see_batch(self, batches: Any, batch: Any) -> None:
        seen = self._passes.get(batches)
        if seen is None:
            return
        size, samples = samples_of(batch)
        seen[1] += size
        samples = samples if seen[1] <= _MAX_SAMPLES else None
        self.write("batch", number=seen[0], size=size, samples=samples, streams=streams())

    # Steps

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # An optimizer may step another one that holds a part of the parameters (ZeroRedundancyOptimizer).
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
        """End this process once its peers have made as many steps, so that the program does not continue."""
        self.write("stopped")
        self._mark_over()
        end_with_peers(self._folder, self._world_size, self._settings.timeout_s)

    def _mark_over(self) -> None:
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
            self._see_file("delete", args[0])  # args[1] != -1: a file inside the folder that rmtree deletes
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
        """Whether ranks that write this file would conflict: it is in the working folder, or in no system folder."""
        if "__pycache__" in path or "ddpshim-logs" in path or path.endswith(".lock"):
            return False
        return path.startswith(self._cwd + os.sep) or not path.startswith(self._elsewhere)


def end_with_peers(folder: Path, num: int, timeout_s: float) -> NoReturn:
    """End this process and its data workers once `folder` holds `num` files "over_*", one per finished process."""
    end = time.monotonic() + timeout_s
    # A peer may still be receiving the last gradients from this one.
    while len(list(folder.glob("over_*"))) < num and time.monotonic() < end:
        time.sleep(0.02)
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a data worker is killed
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Parameters:
    """An optimizer's parameters by name, which of them are in DistributedDataParallel, and their networks' buffers."""

    def __init__(self, params: Sequence[Any]) -> None:
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        found = (o for o in gc.get_objects() if issubclass(type(o), nn.Module))
        modules = [module for module in found if "_modules" in vars(module)]  # else nn.Module.__init__ has not run yet
        mine = {id(p) for p in params}
        wrapped: set[int] = set()
        named: list[tuple[str, Any]] = []
        buffers: list[tuple[str, Any]] = []
        self.groups: list[Any] = []  # keeps the process groups alive until the program has ended
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
    """Return id -> the tensor's longest name, which is its name in the outermost module."""
    return {id(tensor): name for name, tensor in sorted(named, key=lambda item: len(item[0]))}


def place() -> str:
    """Return "file:line" of the innermost frame of the user's program; "" if the stack has none."""
    package = (getattr(sys.modules.get("__main__"), "__package__", None) or "").partition(".")[0]
    stack = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1)))
    return next((shown(name, line) for name, line in stack if is_program(name, package)), "")


def shown(file: str, line: object) -> str:
    """Return "file:line" as reports print it: relative to the working folder if the file is in it."""
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}:{line}"


def is_program(file: str, package: str) -> bool:
    """Whether a Python file is the user's: it belongs to the `package` run with -m, or to no library."""
    is_library = file.startswith(("<", _HERE + os.sep, *_LIBRARIES))
    return f"{os.sep}{package}{os.sep}" in file if package and is_library else not is_library
