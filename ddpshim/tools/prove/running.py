"""Runs a trainer in one process and on several ranks, and reports whether both are the same experiment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

from ddpshim.errors import LaunchError
from ddpshim.job.launch_env import PLACE
from ddpshim.job.say import progress_line, say
from ddpshim.launch.runner import Launch, check, run
from ddpshim.tools.prove import watching
from ddpshim.tools.prove.judging import Proof, judge
from ddpshim.tools.prove.watching import ONE, PERTURBED, Settings

_NUM_LINES_SHOWN = 12


def prove(job: Launch, settings: Settings, alone: Optional[Launch] = None) -> Proof:
    """Run `job` on ranks and `alone` in one process (default: the same program), and return the comparison.

    Raises LaunchError if one of them cannot run or makes no step.
    """
    check(job, os.environ)
    alone = alone or job
    with tempfile.TemporaryDirectory(prefix="ddpshim-prove-") as name:
        folder = Path(name)
        (folder / watching.SETTINGS).write_text(json.dumps(asdict(settings)))
        _run_alone(alone, folder, settings)
        say(f"the same on {settings.num_ranks} ranks")
        code = run(replace(job, proof=name, nproc=str(settings.num_ranks)))
        num_steps = [_num_steps(folder, f"rank_{rank}") for rank in range(settings.num_ranks)]
        proof = judge(folder, settings.num_ranks)
        if (code or not all(num_steps)) and (proof.parting is None or proof.parting.what == "steps"):
            raise LaunchError(
                f"the ranks made {num_steps} steps and ended with exit code {code}: there is nothing to compare. "
                "Read their output above; make the trainer run on several ranks first."
            )
        if code:
            failed = f"the ranks ended with exit code {code} after {num_steps} steps; their output is above"
            proof = replace(proof, notes=[*proof.notes, failed])
        return proof


def _run_alone(job: Launch, folder: Path, settings: Settings) -> None:
    """Run it twice without a launcher's variables; if it makes no step, run it twice as the only rank of a job."""
    said = ""
    ways: tuple[tuple[str, Callable[[], dict[str, str]]], ...] = (("plainly", dict), ("as a single rank", _one_rank))
    for how, environ in ways:
        end = time.monotonic() + settings.timeout_s
        say(f"runs in one process, {how}, and once more with a rounding error in each gradient")
        processes = {ONE: _start(job, folder, ONE, environ())}
        # Many trainers name their output folder by the second: the second run must not start in the first one's folder.
        while processes[ONE].poll() is None and not _num_steps(folder, ONE) and time.monotonic() < end:
            time.sleep(0.05)
        processes[PERTURBED] = _start(job, folder, PERTURBED, environ())
        for name, process in processes.items():
            try:
                _wait(process, end, folder, name, settings.steps)
            except subprocess.TimeoutExpired:
                process.kill()
                raise LaunchError(
                    f"the run in one process made {_num_steps(folder, name)} steps in {settings.timeout_s:g} s: there "
                    "is nothing to compare. Give --timeout more seconds, or --steps fewer steps."
                ) from None
        if _num_steps(folder, ONE) and _num_steps(folder, PERTURBED):
            return
        said = (folder / f"{ONE}.txt").read_text(errors="replace").strip()
        say(f"made no step: {(said.splitlines() or [''])[-1]}")
        for name in processes:
            (folder / f"{name}.jsonl").unlink(missing_ok=True)
    raise LaunchError(
        "in one process the trainer made no step, neither plainly nor as a single rank: there is nothing to "
        "compare. It ended with:\n" + "\n".join(said.splitlines()[-_NUM_LINES_SHOWN:])
    )


def _wait(process: subprocess.Popen[bytes], end: float, folder: Path, name: str, num_steps: int) -> None:
    with progress_line() as show:
        while True:
            show(f"prove: {_num_steps(folder, name)} of {num_steps} steps in one process")
            try:
                process.wait(min(0.5, max(0.1, end - time.monotonic())))
                return
            except subprocess.TimeoutExpired:
                if time.monotonic() >= end:
                    raise


def _start(job: Launch, folder: Path, name: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    argv = [*(["-m"] if job.is_module else []), job.program, *job.arguments]
    kept = {key: value for key, value in os.environ.items() if key not in PLACE}
    with (folder / f"{name}.txt").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "ddpshim.tools.prove.process", str(folder), name, *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**kept, "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", "1"), **environ},
        )


def _one_rank() -> dict[str, str]:
    """Return the launcher's variables of a job of one rank, with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    named = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in named.items()}}


def _num_steps(folder: Path, name: str) -> int:
    return sum(record["kind"] == "step" for record in watching.read(folder, name))


def as_json(proof: Proof) -> dict[str, Any]:
    """Return what `--json` prints; `schema` changes with every change that a program reading it could notice."""
    return {"schema": 1, **asdict(proof)}


def as_text(proof: Proof) -> str:
    """Return the notes and the verdict; if it is "no", also the first difference and its usual cause."""
    lines = [f"note: {note}" for note in proof.notes]
    if proof.is_same:
        size = "" if proof.largest_difference is None else f"largest difference {proof.largest_difference:.0e} "
        alone = "" if proof.of_rounding is None else f"; a rounding error alone comes to {proof.of_rounding:.0e}"
        after = f"after {proof.num_steps} steps on {proof.num_ranks} ranks"
        lines.append(f"the same experiment: yes ({size}{after}{alone})")
        lines.append(
            "  not compared: numbers that the program prints, logs or saves beside its networks; steps after these"
        )
        return "\n".join(lines)
    parting = proof.parting
    lines.append("the same experiment: no")
    if parting is not None:
        where = f" of {parting.where}" if parting.where else ""
        place = parting.place or "outside your code"
        lines.append(f"  differs first in step {parting.step}: {parting.what}{where}, {place}")
        lines += [f"  found:   {parting.found}", f"  usually: {parting.meaning}"]
    return "\n".join(lines)
