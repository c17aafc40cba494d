"""Gives the program the main rank's clock, entropy and commands on all ranks: the same names and decisions.

The n-th call from a line of the program returns, on every rank, the value of the main rank's n-th call from that line.
The main rank never waits; another rank waits until the main rank has made the same call.

Commands run on the main rank only, because files that a command writes cannot be redirected: if each rank ran
`git rev-parse HEAD >> log`, log would get several lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import io
import mmap
import os
import posix
import random
import struct
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, Callable, Optional, TypeVar

from ddpshim.errors import WorldError
from ddpshim.job.collectives import main_sets
from ddpshim.job.world import World
from ddpshim.process import messages
from ddpshim.process.job import current
from ddpshim.process.job_store import is_there
from ddpshim.process.replaced import replaced
from ddpshim.process.users_line import is_pythons
from ddpshim.rows.tensor import Counts
from ddpshim.trainers.unedited.file_calls import in_place
from ddpshim.trainers.unedited.private_files import PrivateFiles

T = TypeVar("T")

# Values of each line that stay in the store, and readings of the clock in memory: as many calls a rank may be behind.
_NUM_KEPT = 1 << 16
_NUM_AT_ONCE, _AT_ONCE_S = 1 << 10, 0.1  # readings of the clock, and the time that they take at least
# Libraries that read the clock for their own purposes (progress bars, loggers, thread pools): not replaced.
_LIBRARIES = {
    *("ddpshim", "torch", "torchvision", "numpy", "tqdm", "rich", "wandb", "tensorboard", "tensorboardX", "matplotlib"),
    *("PIL", "requests", "urllib3", "huggingface_hub", "filelock", "fsspec", "tensorflow", "ray", "numba", "triton"),
    *("h5py", "zarr", "psutil", "pkg_resources", "setuptools", "pluggy", "mlflow", "comet_ml", "clearml", "trackio"),
}
_PASS_ON = {__name__, "uuid", "secrets", "random", "subprocess"}  # call on behalf of their callers


class Readings:
    """The main rank's last readings of its clock, in memory that all ranks map.

    A reading there takes 6 us, through the job's store up to 150 us, and a trainer may read the clock eight times a
    step. The memory is a ring of slots: number of the reading, line, number of the call from there, time, checksum.
    """

    SIZE = _NUM_KEPT * 40

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._num, self._since = memory, 0, 0.0
        self._others: dict[tuple[int, int], bytes] = {}  # readings that this rank has passed, from other lines

    def tell(self, line: str, number: int, value: bytes) -> None:
        """Note 8 bytes, the main rank's result of its call `number` from `line`."""
        content = struct.pack("<qqq8s", self._num, _place(line), number, value)
        struct.pack_into("<32sq", self._memory, self._num % _NUM_KEPT * 40, content, zlib.crc32(content))
        self._num += 1
        if self._num % _NUM_AT_ONCE == 0:  # a loop that waits for a time must not overtake ranks that are late for it
            time.sleep(max(0.0, self._since + _AT_ONCE_S - time.monotonic()))
            self._since = time.monotonic()

    def told(self, line: str, number: int) -> Optional[bytes]:
        """Return the main rank's result of its call `number` from `line`; None if it has not made the call.

        Raises LookupError if the result has been overwritten.
        """
        asked = _place(line), number
        while asked not in self._others:
            content, check = struct.unpack_from("<32sq", self._memory, self._num % _NUM_KEPT * 40)
            found, *call, value = struct.unpack("<qqq8s", content)
            if zlib.crc32(content) != check or found < self._num:  # not written, or not completely
                return None
            if found > self._num:
                raise LookupError
            self._num += 1
            self._others[call[0], call[1]] = value
            if len(self._others) > _NUM_KEPT:  # of lines that only the main rank runs
                del self._others[next(iter(self._others))]
        return self._others.pop(asked)


def _place(line: str) -> int:
    return zlib.crc32(line.encode("utf-8", "surrogateescape"))


def shared_readings(here: World) -> Optional[Readings]:
    """Return what `Clock` takes; None if ranks do not see the same memory, as on several machines (collective)."""
    if here.local_world_size < here.world_size:
        return None
    with contextlib.ExitStack() as until:
        name, memory = "", None
        with contextlib.suppress(OSError):
            if here.is_main:
                made = until.enter_context(tempfile.NamedTemporaryFile(prefix="ddpshim-clock-"))
                made.write(bytes(Readings.SIZE))  # as a later write without room would end the process
                made.flush()
                name = made.name
        name = here.broadcast(name)
        with contextlib.suppress(OSError), open(name, "r+b") as file:
            memory = mmap.mmap(file.fileno(), Readings.SIZE)
        is_seen_by_all = all(here.gather(memory is not None))
    return Readings(memory) if memory is not None and is_seen_by_all else None


class Clock:
    """Replaces Python's clocks, entropy and prompts for calls of the program in its main thread. Local."""

    def __init__(self, world: World, readings: Optional[Readings] = None) -> None:
        """`readings`: of `shared_readings`; without them, ranks ask the job's store for the time."""
        self._world, self._readings = world, readings
        self._is_asking = False  # inside a real function, whose own calls of replaced functions must not be shared
        self._numbers: dict[str, int] = {}  # number of the last call from each line

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within this block, the program's calls use the stand-ins."""
        seconds = self._of_main(lambda: _time(), "<d")
        with contextlib.ExitStack() as undo:
            undo.enter_context(in_place({id(real): made for real, made in self._stand_ins(seconds)}))
            for name, method in (
                ("now", lambda kind, tz=None: kind.fromtimestamp(seconds(), tz)),
                ("utcnow", lambda kind: kind.fromtimestamp(seconds(), datetime.timezone.utc).replace(tzinfo=None)),
            ):
                undo.enter_context(_exchanged(datetime.datetime, name, method))
            yield

    def _stand_ins(self, seconds: Callable[[], float]) -> list[tuple[Any, Any]]:
        """Return pairs of a function and its stand-in."""
        uuid1, seed = uuid.uuid1, self._of_main(lambda: int.from_bytes(posix.urandom(4), "little"))
        hexes = self._of_main(lambda *args, **kwargs: uuid1(*args, **kwargs).hex)

        def at_moment(real: Callable[..., Any], position: int, convert: Any, /, *args: Any) -> Any:
            """Call `real` with the current time as its argument at `position`, if that is missing."""
            is_given = any(one is not None for one in args[position:])
            return real(*args) if is_given else real(*args[:position], convert(seconds()))

        def seeded(real: Callable[..., Any], keyword: str, /, *args: Any, **kwargs: Any) -> Any:
            """Call `real` with a seed if the caller gives none."""
            if (args[0] if args else kwargs.get(keyword)) is None:
                args, kwargs = args[1:], {**kwargs, keyword: seed()}
            return real(*args, **kwargs)

        of_main: Any = ((time.time, "<d"), (time.time_ns, "<q"), (posix.urandom, ""), (input, ""))
        made: list[tuple[Any, Any]] = [(real, self._of_main(real, kind)) for real, kind in of_main]
        made += [(real, partial(at_moment, real, 0, float)) for real in (time.localtime, time.gmtime, time.ctime)]
        made += [
            (real, partial(at_moment, real, at, _localtime)) for real, at in ((time.strftime, 1), (time.asctime, 0))
        ]
        made.append((uuid1, lambda *args, **kwargs: uuid.UUID(hexes(*args, **kwargs))))
        made.append((random.seed, partial(seeded, random.seed, "a")))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            made += [(real, partial(seeded, real, "seed")) for real in (numpy.random.seed, numpy.random.default_rng)]
        return made

    def _of_main(self, real: Callable[..., T], kind: str = "") -> Callable[..., T]:
        """Return `real` with the main rank's result, for the program. `kind`: struct's of a result of 8 bytes."""

        def instead(line: str, *args: Any, **kwargs: Any) -> T:
            return self.answers_of_main(line, lambda: real(*args, **kwargs), kind)

        return partial(self.call, real, instead)

    def call(self, real: Callable[..., T], instead: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call `instead` with the calling line of the program first; `real` for other callers."""
        line = self._line_of_program(sys._getframe(1))
        return real(*args, **kwargs) if line is None else instead(line, *args, **kwargs)

    def _line_of_program(self, frame: Optional[FrameType]) -> Optional[str]:
        """Return "train.py:12", the calling line of the program; None if another caller, thread or process asks."""
        if self._is_asking:
            return None
        while frame is not None and frame.f_globals.get("__name__") in _PASS_ON:
            frame = frame.f_back
        if frame is None:
            return None
        file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__")).partition(".")[0]
        is_others = package in _LIBRARIES or file.startswith("<frozen") or is_pythons(file)
        return None if is_others or not current().part(Counts).is_in_lock_step() else f"{file}:{frame.f_lineno}"

    def answers_of_main(self, line: str, ask: Callable[[], T], kind: str = "") -> T:
        """Return the main rank's result of `ask`. Other ranks wait for it.

        Raises WorldError if the main rank has not made this call in time, or has made 2**16 more from this line.
        """
        number = self._numbers[line] = self._numbers.get(line, -1) + 1
        store, readings = self._world._job.store, self._readings if kind else None
        key = "" if readings is not None else messages.key(f"clock/{line}/{number % _NUM_KEPT}")
        if self._world.is_main:
            with replaced(self, "_is_asking", True):
                value = ask()
            if readings is not None:
                readings.tell(line, number, struct.pack(kind, value))
            else:
                store.set(key, messages.packed([number, value]))
            return value
        found = list[Any]()

        def is_told() -> bool:
            if readings is not None:
                told = readings.told(line, number)
                found[:] = [] if told is None else struct.unpack(kind, told)
            elif is_there(store, key):
                its_number, value = messages.unpacked(store.get(key), 0)
                if its_number > number:
                    raise LookupError
                found[:] = [value] if its_number == number else []
            return bool(found)

        patience_s, did = self._world.options.side_timeout_s, "did not run it, or has left"
        try:
            if main_sets(self._world, is_told, time.monotonic() + patience_s):
                return found[0]  # type: ignore[no-any-return]
        except LookupError:
            did = "ran it more often"
        raise WorldError(
            f"rank {self._world.rank} reached {line} (call {number + 1}), which reads the time or random bytes, but "
            f"the main rank {did} (waited up to {patience_s:g} s); they would continue with different values. Run "
            "this line equally often on every rank."
        )


_time, _localtime = time.time, time.localtime
_run, _system, _popen = subprocess.run, os.system, os.popen


@contextlib.contextmanager
def _exchanged(kind: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Within this block, replace a class method of a type written in C, for all holders of the type."""
    names: Any = next(held for held in gc.get_referents(kind.__dict__) if isinstance(held, dict))
    real = names[name]
    names[name] = classmethod(lambda *args, **kwargs: method(*args, **kwargs))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
    try:
        yield
    finally:
        names[name] = real
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


class Commands:
    """Replaces os.system, os.popen and the functions of subprocess that wait for a command. Local."""

    def __init__(self, clock: Clock, files: PrivateFiles) -> None:
        self._clock, self._files = clock, files

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the program's calls use the stand-ins."""
        made: list[tuple[Any, Any]] = [
            (subprocess.run, self._completed),  # subprocess's others call this and the next, on behalf of their callers
            (subprocess.call, lambda *args, **kwargs: self._completed(*args, **kwargs).returncode),
            (os.system, lambda line, command: self._handed_out(line, lambda: _system(command))),
            (os.popen, self._stream),
        ]
        return in_place({id(real): partial(self._clock.call, real, instead) for real, instead in made})

    def _handed_out(self, line: str, run: Callable[[], Any]) -> Any:
        """Return the main rank's result of `run`; then all ranks see the files that it wrote."""
        result = self._clock.answers_of_main(line, lambda: self._files.shown_to_all(run))
        self._files.see_what_is_shared()
        return result

    def _completed(self, line: str, *args: Any, check: bool = False, **kwargs: Any) -> Any:
        """subprocess.run. If the output goes to an open file, each rank writes it to its own file."""
        given: dict[str, Any] = {name: kwargs.get(name) for name in ("stdout", "stderr")}
        files = {name: to for name, to in given.items() if hasattr(to, "fileno") or (isinstance(to, int) and to >= 0)}
        kwargs |= dict.fromkeys(files, subprocess.PIPE)
        command = args[0] if args else kwargs.get("args")
        kind, *found = self._handed_out(line, lambda: _outcome(args, kwargs))
        if kind == "failed":
            raise OSError(*found)
        outputs = dict(zip(("stdout", "stderr"), found[1:]))
        for name, file in files.items():
            output = outputs[name] or b""
            descriptor = file if isinstance(file, int) else file.fileno()
            os.write(descriptor, output if isinstance(output, bytes) else output.encode())
            outputs[name] = None
        if kind == "late":
            raise subprocess.TimeoutExpired(command, found[0], *outputs.values())  # type: ignore[arg-type]
        if check and found[0]:
            raise subprocess.CalledProcessError(found[0], command, *outputs.values())  # type: ignore[arg-type]
        return subprocess.CompletedProcess(command, found[0], *outputs.values())  # type: ignore[arg-type]

    def _stream(self, line: str, command: str, mode: str = "r", buffering: int = -1) -> Any:
        if mode != "r":
            return _popen(command, mode, buffering)
        done = self._completed(line, command, shell=True, text=True, stdout=subprocess.PIPE)
        pythons: Any = os._wrap_close
        return pythons(io.StringIO(done.stdout), SimpleNamespace(wait=lambda: done.returncode))


def _outcome(args: Any, kwargs: Any) -> list[Any]:
    """Run the command and return its outcome as values that can be sent to other ranks."""
    try:
        done = _run(*args, **kwargs)
    except subprocess.TimeoutExpired as error:
        return ["late", error.timeout, error.output, error.stderr]
    except OSError as error:
        return ["failed", error.errno, error.strerror, error.filename]
    return ["done", done.returncode, done.stdout, done.stderr]
