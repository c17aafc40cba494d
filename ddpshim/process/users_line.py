"""Finds the line of the user's program that is running, for messages, and describes what a thread does.

A line of a library or of ddpshim is not the user's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from traceback import FrameSummary
from types import FrameType
from typing import Any, NamedTuple, Optional

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PYTHON = os.path.dirname(os.__file__)
_relative = functools.lru_cache(maxsize=4096)(os.path.relpath)


def users_line(frame: Optional[FrameType] = None, error: Optional[BaseException] = None) -> str:
    """Return "train.py:12", the innermost line of the user's program; else of an installed package. Local.

    `frame`: where to begin; default the caller. `error`: begin where it was raised.
    """
    frame = frame or sys._getframe(1)
    for raised, _ in traceback.walk_tb(error.__traceback__ if error is not None else None):
        frame = raised
    installed, package = "", _started_package()
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_of_program(file, package):
            return shown(file, frame.f_lineno)
        if not installed and not is_torchs_or_ours(file):
            installed = shown(file, frame.f_lineno)
        frame = frame.f_back
    return installed or "a line of torch"


def is_users(file: str) -> bool:
    """Return whether `file` is of no library, or of the package that Python was started with (`-m`). Local."""
    return _is_of_program(file, _started_package())


def _started_package() -> str:
    return (getattr(sys.modules.get("__main__"), "__package__", None) or "").partition(".")[0]


@functools.lru_cache(maxsize=4096)
def _is_of_program(file: str, package: str) -> bool:
    is_installed = "site-packages" in file or "dist-packages" in file
    is_started = bool(package) and f"{os.sep}{package}{os.sep}" in file
    return not is_torchs_or_ours(file) and (is_started or not is_installed)


@functools.lru_cache(maxsize=4096)
def is_torchs_or_ours(file: str) -> bool:
    """Return whether `file` is of torch, ddpshim or Python's standard library. Local."""
    return short(file).startswith(("torch/", "ddpshim/", "python/", "<"))


def is_pythons(file: str) -> bool:
    """Return whether `file` is of Python's standard library. Local."""
    return file.startswith(_PYTHON + os.sep) and "-packages" not in file


def short(file: str) -> str:
    """Return a file's name from "torch/", "ddpshim/" or "python/" on, if it belongs to one; else unchanged. Local."""
    torch = sys.modules.get("torch")
    roots = {"ddpshim": _OURS, "torch": os.path.dirname(getattr(torch, "__file__", None) or "/no torch")}
    for name, root in roots.items():
        if file.startswith(root + os.sep):
            return name + file[len(root) :].replace(os.sep, "/")
    return "python" + file[len(_PYTHON) :].replace(os.sep, "/") if is_pythons(file) else file.replace(os.sep, "/")


def shown(file: str, line: object) -> str:
    """Return "file:line" as messages print it: relative to the working folder if the file is in it. Local."""
    near = _relative(file, os.getcwd())
    return f"{file if near.startswith('..') else near}:{line}"


# Frames that are not shown: outermost in every program, or innermost because a rank is asked for its place, or ends.
_AROUND = (
    *("python/runpy.py", "<frozen", "python/contextlib.py", "ddpshim/launch/", "ddpshim/failures/hang_detector.py"),
    *("ddpshim/process/users_line.py", "ddpshim/failures/failure.py", "ddpshim/process/job.py"),
    *("ddpshim/job/group.py", "ddpshim/job/process_group.py"),
)
_MOST_FRAMES = 10

# Work that one rank may do alone for any time: (file, function, name), found in its stack. A wait for it is not
# reported for ten minutes.
_SECTIONS = (
    ("ddpshim/job/collectives.py", "run_on_main", "World.run_on_main"),
    ("ddpshim/checkpoint/", "", "a save"),
    ("ddpshim/evaluation/", "", "a rollout"),
    ("ddpshim/robomimic/rollout.py", "", "a rollout"),
    ("robomimic/utils/train_utils.py", "rollout_with_stats", "a rollout"),
    ("robomimic/utils/train_utils.py", "save_model", "a save"),
    ("ddpshim/data/node_memory.py", "", "reading a dataset"),
    ("ddpshim/robomimic/node_cache.py", "", "reading a dataset"),
    ("ddpshim/robomimic/datasets.py", "", "reading a dataset"),
    ("robomimic/utils/dataset.py", "load_dataset_in_memory", "reading a dataset"),
    ("python/bdb.py", "", "a debugger"),
)
_WORLDS = ("ddpshim/job/world.py", "ddpshim/job/collectives.py")  # the second has no other public function that waits
# Functions of ddpshim that wait for other ranks outside of torch.distributed's own functions.
_WAITS = {
    ("ddpshim/job/exchange.py", "pairs"): "a message to all ranks",
    ("ddpshim/job/exchange.py", "table"): "a gather of tensors",
    ("ddpshim/rows/blocks.py", "gather_alike"): "a gather of rows",
    ("ddpshim/job/collectives.py", "gather_with_deadline"): "World.gather_with_deadline",
    ("ddpshim/job/collectives.py", "answers_of_main"): "the order of a loader",
    ("ddpshim/job/collectives.py", "result"): "a check between two steps",
    ("ddpshim/model/equality.py", "finish"): "the comparison of weights",
    ("ddpshim/job/debugger.py", "_meet"): "a debugger, for the main rank",
}


class Progress:
    """This rank's progress in its job.

    Attributes:
        num_passes: backward passes whose gradients were reduced.
        num_collectives: collectives of `World`.
        batch: epoch and step of the last batch from `make_loader`; None before.
        is_reducing: whether the host waits at the end of a backward pass.
    """

    def __init__(self) -> None:
        self.num_passes = self.num_collectives = 0
        self.batch: Optional[tuple[int, int]] = None
        self.is_reducing = False
        self._event: Any = None

    def end_pass(self, is_on_gpu: bool) -> None:
        """Record that a backward pass is over, at least for the host. Local."""
        self.is_reducing = False
        self.num_passes += 1
        if is_on_gpu:
            import torch

            self._event = self._event or torch.cuda.Event()
            self._event.record()

    def waits_on_gpu(self) -> bool:
        """Return whether the GPU still computes gradients of the last backward pass. Local; safe in any thread."""
        with contextlib.suppress(RuntimeError):
            return self._event is not None and not self._event.query()
        return False


class Place(NamedTuple):
    """A thread's current activity.

    Attributes:
        waits_in: the collective in which it waits for other ranks; None if it works itself.
        section: the work that it does, if that may take arbitrarily long.
        site: the innermost line of the user's program.
        lines: its stack, as in a traceback.
    """

    waits_in: Optional[str]
    section: Optional[str]
    site: str
    lines: list[str]


def frames_of(thread: int) -> list[FrameType]:
    """Return the stack of a thread of this process, outermost frame first; empty if it has ended. Local."""
    frame, frames = sys._current_frames().get(thread), list[FrameType]()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def place_of(stack: list[FrameSummary], progress: Progress, waits_on_gpu: bool = False) -> Place:
    """Return the activity of a thread with this stack, outermost frame first. Local."""
    stack = [frame for frame in stack if not short(frame.filename).startswith(_AROUND)]
    files = [(short(frame.filename), frame.name) for frame in stack]
    own = [frame for frame in stack if not is_torchs_or_ours(frame.filename)]
    innermost = ([frame for frame in own if is_users(frame.filename)] or own or stack or [FrameSummary("", 0, "")])[-1]
    if waits_on_gpu:
        waits_in: Optional[str] = f"backward pass {progress.num_passes}"
    elif progress.is_reducing and any(file.startswith("torch/autograd/") for file, _ in files):
        waits_in = f"backward pass {progress.num_passes + 1}"
    else:
        waits_in = _collective(files, progress)
    found = (s[2] for s in _SECTIONS for at in files if s[0] in at[0] and s[1] in ("", at[1]))
    section = None if waits_in else next(found, None)
    site = shown(innermost.filename, innermost.lineno) if stack else "at the end of its program"
    if waits_in is not None and own:
        stack = stack[: stack.index(own[-1]) + 1]  # without torch's frames
    return Place(waits_in, section, site, "".join(traceback.format_list(stack[-_MOST_FRAMES:])).splitlines())


def _collective(files: list[tuple[str, str]], progress: Progress) -> Optional[str]:
    """Return the collective of World or torch in which a thread with these files and functions is; None if in none."""
    waits_in: Optional[str] = None
    for file, function in reversed(files):
        if file == "torch/distributed/distributed_c10d.py":
            waits_in = f"torch.distributed.{function}"
        elif (file, function) in _WAITS:
            waits_in = _WAITS[file, function]
        elif file in _WORLDS and waits_in is not None and not function.startswith("_"):
            waits_in = f"World.{function} (collective {progress.num_collectives} of World's)"
        elif not file.startswith(("torch/", "ddpshim/", "python/")):
            break
    return waits_in
