"""Runs a job on several ranks under audit and returns the report on its records."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

from ddpshim.job.say import say
from ddpshim.launch.runner import Launch, run
from ddpshim.tools.audit import recording
from ddpshim.tools.audit.judging import Judgement, judge
from ddpshim.tools.audit.recording import Settings
from ddpshim.tools.audit.witness import Record

_TICK_S = 0.1
_STACK_DEADLINE_S = 10.0
# Ends of faulthandler's last line: the main thread's outermost frame, or "..." if the stack was too deep.
_LAST_FRAME = ("in <module>", "in _run_module_as_main", "...")


def audit(job: Launch, settings: Settings, single_batch: Optional[int] = None) -> tuple[Judgement, int]:
    """Run `job` and return the report and the exit code, which is 0 if the job stalled and was stopped.

    `single_batch`: samples of one step of the one-process training. Raises LaunchError, before anything is started, if
    the job cannot run.
    """
    num_ranks = int(job.nproc)
    with tempfile.TemporaryDirectory(prefix="ddpshim-audit-") as name:
        folder = Path(name)
        (folder / recording.SETTINGS).write_text(json.dumps(asdict(settings)))
        package = job.program.partition(".")[0] if job.is_module else ""
        with _Watch(folder, num_ranks, settings.timeout_s, package) as watch:
            code = run(replace(job, audit=name))
        report = judge(_read(folder, num_ranks), watch.is_stalled, single_batch)
    return report, 0 if watch.is_stalled else code


def as_json(report: Judgement, exit_code: int) -> dict[str, Any]:
    """Return what `--json` prints; `schema` changes with every change that a program reading it could notice."""
    return {"schema": 1, "exit_code": exit_code, **asdict(report)}


def as_text(report: Judgement, program: str, exit_code: int) -> str:
    """Return the report as text: facts, findings, notes, what was not checked, and a summary line."""
    lines = [f"audit of {program}"]
    lines += [f"  {name + ':':28}{value}" for name, value in report.facts.items()]
    lines += [finding.as_text() for finding in report.findings]
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"not checked: {what}" for what in report.not_looked_at]
    counts = {name: sum(finding.severity == name for finding in report.findings) for name in ("error", "warning")}
    found = ", ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n) or "nothing found"
    lines.append(found + (f"; the trainer failed (exit code {exit_code}), see above" if exit_code else ""))
    return "\n".join(lines)


class _Watch:
    """Within this block, if no rank records anything for `timeout_s`, save the ranks' stacks and kill them."""

    def __init__(self, folder: Path, num_ranks: int, timeout_s: float, package: str) -> None:
        self._folder, self._num_ranks, self._timeout_s, self._package = folder, num_ranks, timeout_s, package
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.is_stalled = False

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        size, since = 0, time.monotonic()
        while not self._ended.wait(_TICK_S):
            now = sum(file.stat().st_size for file in self._folder.glob("rank_*.jsonl"))
            if now != size or not now:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > self._timeout_s:
                self.is_stalled = True
                self._end_ranks()
                return

    def _end_ranks(self) -> None:
        every = {rank: records for rank, records in _read(self._folder, self._num_ranks).items() if records}
        # The pid of an ended process may belong to another process by now. torchrun ends the remaining ones.
        running = {rank for rank, records in every.items() if all(record["kind"] != "end" for record in records)}
        pids = {rank: every[rank][0]["pid"] for rank in running or every}
        if recording.SHOW_STACK is not None:
            _signal(pids, recording.SHOW_STACK)
            deadline = time.monotonic() + _STACK_DEADLINE_S
            for rank in pids:
                place = self._innermost(self._stacks(rank, deadline))
                with (self._folder / f"rank_{rank}.jsonl").open("a") as file:
                    print(json.dumps({"kind": "stack", "place": place}), file=file)
        say(f"no rank made progress for {self._timeout_s:g} s: stopped")
        _signal(pids, signal.SIGKILL)

    def _stacks(self, rank: int, deadline: float) -> str:
        """Return the stacks that a rank writes on a signal, once complete: on busy cores this takes a while."""
        while True:
            said = (self._folder / f"stack_{rank}").read_text()
            if said.rstrip().endswith(_LAST_FRAME) or time.monotonic() > deadline or self._ended.wait(_TICK_S):
                return said

    def _innermost(self, stacks: str) -> str:
        """Return the program's innermost line in faulthandler's output, where the main thread is the last."""
        frames = re.findall(r'File "(.+)", line (\d+) in', stacks.rpartition("(most recent call first)")[2])
        mine = (recording.shown(file, line) for file, line in frames if recording.is_program(file, self._package))
        return next(mine, "")


def _signal(pids: dict[int, int], number: int) -> None:
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _read(folder: Path, num_ranks: int) -> dict[int, list[Record]]:
    """Return each rank's records so far, without an incomplete last line; [] for a rank that never started."""
    out: dict[int, list[Record]] = {}
    for rank in range(num_ranks):
        file = folder / f"rank_{rank}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        out[rank] = [json.loads(line) for line in lines if line.endswith("\n")]
    return out
