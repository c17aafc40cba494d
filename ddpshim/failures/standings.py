"""Says by a rank's stack what it does, and which ranks are missing; loaded when a rank has made no progress."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from traceback import FrameSummary
from types import FrameType
from typing import NamedTuple, Optional

from ddpshim.failures.failure_notes import SAME_WAY
from ddpshim.process.observed import Progress
from ddpshim.process.say import count, ranks_called
from ddpshim.process.users_line import is_torchs_or_ours, is_users, short, shown

MOVES_S = 3.0  # a rank that made progress within this time is working
OPT_OUT = "DDPSHIM_GUARD=0 turns this check off"
_DECLARED_S = 600.0  # work that one rank is known to do alone is not reported before
DEADLOCK_S = 10.0  # ranks that wait in different places for so long will wait forever
# Frames that are not shown: outermost in every program, or innermost because a rank is asked for its place, or ends.
_AROUND = (
    *("python/runpy.py", "<frozen", "python/contextlib.py", "ddpshim/launch/", "ddpshim/failures/"),
    *("ddpshim/process/users_line.py", "ddpshim/process/job.py"),
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
    ("ddpshim/robomimic/node_memory.py", "", "reading a dataset"),
    ("ddpshim/robomimic/node_cache.py", "", "reading a dataset"),
    ("ddpshim/robomimic/calls.py", "load_data_for_training", "reading a dataset"),
    ("robomimic/utils/dataset.py", "load_dataset_in_memory", "reading a dataset"),
    ("python/bdb.py", "", "a debugger"),
)
_PASSES = "torch/autograd/", "ddpshim/model/mean_gradients.py"
_WORLDS = ("ddpshim/job/world.py", "ddpshim/job/collectives.py")
# Functions of ddpshim that wait for other ranks outside of torch.distributed's own functions.
_WAITS = {
    ("ddpshim/job/collectives.py", "pairs"): "a message to all ranks",
    ("ddpshim/job/collectives.py", "table"): "a gather of tensors",
    ("ddpshim/job/collectives.py", "add_up"): "a sum of tensors",
    ("ddpshim/job/collectives.py", "backward"): "a sum of gradients",
    ("ddpshim/rows/blocks.py", "gather_alike"): "a gather of rows",
    ("ddpshim/job/collectives.py", "gather_with_deadline"): "World.gather_with_deadline",
    ("ddpshim/job/collectives.py", "answers_of_main"): "the order of a loader",
    ("ddpshim/job/collectives.py", "result"): "a check between two steps",
    ("ddpshim/model/equality.py", "finish"): "the comparison of weights",
    ("ddpshim/job/debugger.py", "_meet"): "a debugger, for the main rank",
}


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
    elif progress.is_reducing and any(file.startswith(_PASSES) for file, _ in files):
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


class Standing(NamedTuple):
    """A rank's state, as it reports it; see `Place` and `observed.Progress`.

    Attributes:
        num_passes: backward passes so far.
        still_s: seconds without progress.
        has_left: whether it has left the job, or its program has ended.
    """

    num_passes: int
    batch: Optional[Sequence[int]]
    waits_in: Optional[str]
    section: Optional[str]
    site: str
    lines: list[str]
    still_s: float = 0.0
    has_left: bool = False


class Verdict(NamedTuple):
    """What is wrong, by a rank's question about the others.

    Attributes:
        named: the missing ranks, if any.
        text: which rank waits for which, and where each rank is.
        ends_job: whether waiting is useless.
    """

    named: Sequence[int]
    text: str
    ends_job: bool = False


Standings = Mapping[int, Optional[Standing]]  # by rank; None: it gave no answer


def judge(standings: Standings, asker: int) -> Optional[Verdict]:
    """Return which ranks are missing if rank `asker` has waited too long; None if it may wait. Local.

    It ends the job where waiting is useless: all ranks have waited for ten seconds, in different places, or the missing
    ranks have left.
    """
    mine, others = standings[asker], [theirs for theirs in standings.values() if theirs is not None]
    if mine is None or mine.waits_in is None:
        return None
    if any(theirs.section and not theirs.has_left for theirs in others) and mine.still_s < _DECLARED_S:
        return None
    away = [rank for rank, theirs in standings.items() if theirs is None or theirs.has_left or theirs.waits_in is None]
    named = away or _apart(standings)
    waited = f"rank {asker} has waited {mine.still_s:.0f} s in {mine.waits_in} ({mine.site})"
    where = f"Where each rank is:\n{describe(standings, named)}"
    if not named:
        none = "and so have all others: none is missing; their messages differ, or their network fails"
        return Verdict([], f"{waited}, {none}. {where}")
    said = f"{waited} for {ranks_called(named)}" if away else f"{waited}, while others wait elsewhere"
    have_left = all((theirs := standings[rank]) is not None and theirs.has_left for rank in named)
    is_deadlock = not away and all(theirs.still_s >= DEADLOCK_S for theirs in others)
    if not (have_left or is_deadlock):
        return Verdict(named, f"{said}. {where}")
    why = f"; {ranks_called(named)} left the job" if have_left else ""
    to_do = f"{SAME_WAY} ({OPT_OUT})"
    return Verdict(named, f"{said}{why}: ranks would hang until a timeout. {to_do}. {where}", ends_job=True)


def _apart(standings: Standings) -> list[int]:
    """Return the ranks that wait in another collective than most; in a tie, those with fewer backward passes."""
    by_place: dict[Optional[str], list[int]] = {}
    for rank, theirs in standings.items():
        by_place.setdefault(theirs and theirs.waits_in, []).append(rank)

    def order(ranks: list[int]) -> tuple[int, int]:
        first = standings[ranks[0]]
        return len(ranks), (first and first.num_passes) or 0

    most = max(by_place.values(), key=order)
    return [rank for rank in standings if rank not in most]


def describe(standings: Standings, named: Sequence[int]) -> str:
    """Return a line for each rank (one line for ranks in the same place), and the stacks of the named ranks. Local."""
    lines, ranks_at = [], dict[str, list[int]]()
    for rank, theirs in standings.items():
        if rank not in named:
            ranks_at.setdefault(_where(theirs), []).append(rank)
    lines += [f"  {ranks_called(ranks)}: {where}" for where, ranks in ranks_at.items()]
    for rank in named:
        theirs = standings[rank]
        lines += [f"  rank {rank}: {_where(theirs)}", *(f"    {line}" for line in (theirs.lines if theirs else []))]
    return "\n".join(lines)


def _where(theirs: Optional[Standing]) -> str:
    if theirs is None:
        return "gave no answer: its process is stopped or gone, or holds the GIL"
    made = count(theirs.num_passes, "backward pass", "es")
    if theirs.batch is not None:
        made += f", batch {theirs.batch[1]} of epoch {theirs.batch[0]}"
    if theirs.has_left:
        return f"{made}; has left the job ({theirs.site})"
    does = f"waits in {theirs.waits_in}" if theirs.waits_in else f"is in {theirs.section or 'its own code'}"
    since = f"for {theirs.still_s:.0f} s" if theirs.still_s > MOVES_S else "and moves"
    return f"{made}; {does} ({theirs.site}), {since}"
