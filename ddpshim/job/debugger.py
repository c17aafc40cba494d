"""Defines `Debugger`, pdb on ranks: the main rank reads the terminal, and every rank does what is typed there.

Each rank runs its own pdb, so printing a row tensor gathers on all ranks, and an assignment applies on all. The main
rank puts each line into the job's store, where the others wait for it without a deadline: no rank waits in a collective
meanwhile. (`torch.distributed.breakpoint` stops one rank and lets the others wait in a barrier: a gather would hang.)
"""

from __future__ import annotations

import bdb
import io
import math
import os
import pdb
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, Optional

from ddpshim.failures import failure_notes
from ddpshim.job.collectives import comes
from ddpshim.process import messages
from ddpshim.process.job import current
from ddpshim.process.launch_env import read_launch_env
from ddpshim.process.replaced import replaced
from ddpshim.process.say import ranks_called, say
from ddpshim.process.users_line import is_torchs_or_ours, short, shown
from ddpshim.variables import RANK_LOGS

_COMES_S = 3.0  # then the main rank says who has not come
# What the main rank sends besides lines, which end in a newline.
_STOPS, _GOES_ON, _QUITS = "stops", "goes on", "quits"
# Each rank fetches other samples there, some one more than others.
_FETCHING = ("torch/utils/data/_utils/fetch.py", "ddpshim/rows/loader.py")


class _Stops:
    follows = False  # this rank follows the main rank through a stop, in this job


class _Lines(io.TextIOBase):
    """The lines typed at the main rank's terminal: on every rank, or `alone` on the main rank."""

    def begin(self, frame: FrameType, line: int) -> bool:
        """Meet the other ranks at that `line` of `frame`; return whether this rank stops there (collective)."""
        job, self._terminal = current(), sys.stdin or io.StringIO()
        world = job.world or job.left
        self._rank, size = _rank(), 1 if world is None else world.world_size
        self._place = shown(frame.f_code.co_filename, line)
        why = ""
        if job.world is None:
            why = "outside of ddpshim.setup() and cleanup()"
        elif size > 1 and threading.current_thread() is not threading.main_thread():
            why = "in a thread"
        elif size > 1 and any(short(file).startswith(_FETCHING) for file in _files(frame)):
            why = "where each rank fetches its own samples"
        self._alone = bool(why) or size == 1
        if why and self._rank == 0:
            say(f"{self._place}: only rank 0 stops here, {why}. The others go on, and wait for it up to timeout_s")
        if self._alone:
            return self._rank == 0
        if self._rank > 0:
            return self._meet()
        number, end = self._send(_STOPS), time.monotonic() + _COMES_S
        absent = [r for r in range(1, size) if not comes(job.store, r, f"debugger/{number}/{r}", end)]
        if absent:
            say(
                f"{ranks_called(absent)} did not come to {self._place} yet, and do nothing of what you type here "
                "before. A rank that never comes waits for this one in its next collective, up to timeout_s"
            )
        return True

    def _meet(self) -> bool:
        """On another rank: wait until the main rank stops at the same line; return whether this rank stops too."""
        stops = current().part(_Stops)
        while (received := self._receive()) is not None:
            number, place, what = received
            if what == _QUITS:
                raise SystemExit(1)
            if what == _STOPS and place == self._place:
                current().store.set(f"debugger/{number}/{self._rank}", "here")
                stops.follows = True
                return True
            if what == _GOES_ON and stops.follows:  # it went on from a line that this rank does not run
                stops.follows = False
                return False
        return False

    def readline(self, size: Optional[int] = -1) -> str:  # type: ignore[override]
        """Return the next line, as a file does; "" at the end of standard input. Raises SystemExit after Ctrl-C."""
        if self._rank == 0:
            line = self._terminal.readline()
            self._send(line)
            return line
        received = self._receive()
        return "" if received is None else received[2]

    def quit(self, is_end: bool) -> None:
        """End the job; `is_end`: standard input has ended."""
        if self._rank == 0:
            said = f"{self._place} was quit in the debugger, which ends the job (exit code 1)"
            if is_end and not self._terminal.isatty():
                said = (
                    f"{self._place} waits in the debugger, but standard input has ended, so no one can answer: the job "
                    "ends (exit code 1). Start it in a terminal, or set PYTHONBREAKPOINT=0, which ignores breakpoint()"
                )
            say(said)
            failure_notes.write(bdb.BdbQuit(said), 1)  # before the other ranks' notes: `run` has nothing to add
            self._send(_QUITS)
        else:
            while not self._alone and (received := self._receive()) is not None and received[2] != _QUITS:
                continue
        raise SystemExit(1)

    def _send(self, what: str) -> int:
        if self._alone or self._rank > 0:
            return -1
        number = current().next_number("debugger")
        current().store.set(f"debugger/{number}", messages.packed([self._place, what]))
        return number

    def _receive(self) -> Optional[tuple[int, str, str]]:
        """Return the main rank's next message: its number, where that rank is, what it does; None if it has left."""
        number, store = current().next_number("debugger"), current().store
        if not comes(store, 0, f"debugger/{number}", math.inf):
            return None
        place, what = messages.unpacked(store.get(f"debugger/{number}"), 0)
        return number, place, what


def changed(made: pdb.Pdb, given: dict[str, Any]) -> dict[str, Any]:
    """Make `made`, which is about to be initialised, a `Debugger`; return the arguments for that. Local."""
    made.__class__ = Debugger
    made.lines = lines = _Lines()  # type: ignore[attr-defined]
    is_shown = RANK_LOGS in os.environ or _rank() == 0
    out = sys.stdout if is_shown else open(os.devnull, "w")  # noqa: SIM115
    # After `c`, pdb would let Ctrl-C stop the program in it: `run` sends it to end all ranks.
    return {**given, "stdin": lines, "stdout": out, "nosigint": True}


class Debugger(pdb.Pdb):
    """pdb on a rank."""

    lines: _Lines

    def cmdloop(self, intro: Any = None) -> None:
        """Do what is typed until the program goes on (collective)."""
        if not self.lines.begin(*self.stack[self.curindex]):
            self.set_continue()
            return
        try:
            # For `interact`, and for input() in what is typed: an error there must not end the job.
            with replaced(sys, "stdin", self.lines), replaced(sys, "excepthook", sys.__excepthook__):
                super().cmdloop(intro)
        except KeyboardInterrupt:  # `run` has passed it on to all ranks, to end them
            raise SystemExit(130) from None

    def stop_here(self, frame: FrameType) -> bool:
        """Whether to stop in `frame`: not in ddpshim, nor after the end of the program. Local."""
        if not super().stop_here(frame) or short(frame.f_code.co_filename).startswith("ddpshim/"):
            return False
        return not all(map(is_torchs_or_ours, _files(frame)))

    def do_continue(self, arg: str) -> Any:
        """Go on, on all ranks, which then do not stop at the next line."""
        current().part(_Stops).follows = False
        self.lines._send(_GOES_ON)
        return super().do_continue(arg)

    def do_quit(self, arg: str) -> Any:
        """End the job."""
        self.lines.quit(is_end=False)

    def do_EOF(self, arg: str) -> Any:
        """End the job."""
        self.lines.quit(is_end=True)

    do_c = do_cont = do_continue
    do_q = do_exit = do_quit


def _rank() -> int:
    world = current().world or current().left
    return read_launch_env(os.environ).rank if world is None else world.rank


def _files(frame: FrameType) -> list[str]:
    """Return the file of `frame` and of each caller, innermost first."""
    return [caller.f_code.co_filename for caller, _ in traceback.walk_stack(frame)]
