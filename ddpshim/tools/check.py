"""Runs a trainer in one process and on several ranks, and reports whether both are the same experiment."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

import torch

from ddpshim import variables, version
from ddpshim.errors import LaunchError
from ddpshim.launch import runner
from ddpshim.launch.runner import Launch, make_log_dir, run
from ddpshim.options import Options
from ddpshim.process.launch_env import PLACE
from ddpshim.process.say import count, say
from ddpshim.reading import end_of
from ddpshim.tools import new_files, watching
from ddpshim.tools.comparing import NUMBERS
from ddpshim.tools.judging import Proof, judge
from ddpshim.tools.run_records import RunRecords
from ddpshim.tools.watching import AGAIN, ONE, ProofSettings
from ddpshim.trainers.unedited.program import Sources, file_of

# Instructions of the processor that round otherwise: of torch, oneDNN and MKL.
_ROUNDED_OTHERWISE = {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
_ANY_ORDER = "PYTHONHASHSEED", "random"
_NEVER_COMPARED = "numbers that the program prints, logs or saves beside its networks; steps after these"


def check(job: Launch, settings: ProofSettings, alone: Optional[Launch] = None, own_ddp: bool = False) -> Proof:
    """Run `job` on ranks and `alone` in one process (default: the same program), and return the comparison.

    If they differ, `alone` runs once more, rounded otherwise: two runs in one process may differ as much.
    Writes the answer into check.md too, beside the logs. With `own_ddp` ddpshim leaves the program alone, and its one
    process is a single rank of a job, if it can be, so that it has the sampler that ranks have.

    Raises LaunchError if one of them cannot run or makes no step.
    """
    if own_ddp:
        os.environ[variables.UNEDITED] = "off"
    runner.check(job, os.environ)
    logs, variables_of_one = make_log_dir(job), {**os.environ}  # to which `run` adds those of ranks
    with new_files.without_traces() as folder:
        (folder / watching.SETTINGS).write_text(json.dumps(asdict(settings)))
        say(f"runs of {settings.steps} steps; their output goes to {logs}, and files that they make are removed")
        _run_one(alone or job, folder, logs, settings, ONE, variables_of_one)
        new_files.remove(folder)  # the ranks must not find the checkpoints of this one
        say(f"run 2: the same program on {settings.num_ranks} ranks")
        code = run(replace(job, proof=str(folder), nproc=str(settings.num_ranks), log_dir=str(logs)))
        num_steps = [RunRecords(folder, f"rank_{rank}").num_steps for rank in range(settings.num_ranks)]
        proof = judge(folder, settings.num_ranks)
        if proof.parting is not None and all(num_steps):
            new_files.remove(folder)
            is_number = proof.parting.what in NUMBERS
            own = replace(settings, is_nudged=is_number, steps=settings.steps if is_number else proof.parting.step)
            (folder / watching.SETTINGS).write_text(json.dumps(asdict(own)))
            variables_of_one.update(_ROUNDED_OTHERWISE if is_number else {})
            try:
                _run_one(alone or job, folder, logs, settings, AGAIN, variables_of_one)
                proof = judge(folder, settings.num_ranks)
            except LaunchError as error:
                say(f"without run 3 the answer does not tell rounding from a mistake: {error}")
        proof = replace(proof, notes=[*proof.notes, *_says_whose(job, folder)])
    if (code or not all(num_steps)) and (proof.parting is None or proof.parting.what == "steps"):
        said = "" if code else f" Rank 0 ended with:\n{end_of(logs / 'rank_0.log')}"
        raise LaunchError(
            f"the ranks made {num_steps} steps and ended with exit code {code}: there is nothing to compare. "
            f"Make the trainer run on several ranks first; their output is in {logs}.{said}"
        )
    if code:
        failed = f"the ranks ended with exit code {code} after {num_steps} steps; their output is in {logs}"
        proof = replace(proof, notes=[*proof.notes, failed])
    (logs / "check.md").write_text(_page(proof), encoding="utf-8")
    return proof


def _run_one(
    job: Launch, folder: Path, logs: Path, settings: ProofSettings, name: str, environ: Mapping[str, str]
) -> None:
    """Run it without a launcher's variables; if it makes no step, as the only rank of a job. With DDPSHIM_UNEDITED=off
    the other way round. Draws by sample are those of a rank of `run`, so it is one."""
    kept = {key: value for key, value in environ.items() if key not in PLACE and (key, value) != _ANY_ORDER}
    # Sets have another order than on ranks, and the same in both runs in one process: that shows what depends on it.
    plain = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1", **kept}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GROUP_RANK": "0"}
    place.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})  # as torchrun's
    start: list[str] = []
    ways = [("one process", plain), ("one process as a single rank of a job", {**plain, **place})]
    no_step = "neither plainly nor as a single rank"
    if Options.read().draws == "sample":
        how, no_step = "one rank of `run`, since the plain program does not draw by sample", "as one rank of `run`"
        ways, start = [(how, {**plain, "PYTHONHASHSEED": "0", **kept, **place})], ["-m", "ddpshim.launch.rank"]
    elif os.environ.get(variables.UNEDITED) == "off":
        ways.reverse()
    log, which = logs / f"{name}.log", "run 1" if name == ONE else "run 3, since they differ"
    for how, environ in ways:
        say(f"{which}: {how}")
        command = [sys.executable, "-m", "ddpshim.tools.watching", str(folder), name, *start, *job.command]
        with log.open("wb") as out:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            try:
                subprocess.run(command, env=environ, timeout=settings.timeout_s, check=False, **streams)
            except subprocess.TimeoutExpired:
                made = RunRecords(folder, name).num_steps
                raise LaunchError(
                    f"the run in one process made {made} steps in {settings.timeout_s:g} s: there is nothing to "
                    "compare. Give --timeout more seconds, or --steps fewer steps."
                ) from None
        if RunRecords(folder, name).num_steps:
            return
        new_files.remove(folder)
        said = end_of(log)
        say(f"made no step: {said.rpartition(chr(10))[2]}")
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
    raise LaunchError(
        f"in one process the trainer made no step, {no_step}: there is nothing to compare. It ended with:\n{said}"
    )


def _says_whose(job: Launch, folder: Path) -> Iterator[str]:
    """Yield a note if the program can distribute itself, and ddpshim did so in its place, as for a single process."""
    sources = Sources(file_of(job.command))
    can = sources.own_way is None and (sources.joins or sources.asks_for_rank or "accelerate" in sources.packages)
    if can and all(r["streams"] is None for r in RunRecords(folder, "rank_0").all("loss")):
        yield (
            "the program can distribute itself; ddpshim did so here, and the answer is about that, as under `run`. "
            "--own-ddp checks the program's own DDP"
        )


def _page(proof: Proof) -> str:
    text, versions = as_text(proof), f"torch {torch.__version__}, Python {platform.python_version()}"
    command = shlex.join(["python", "-m", "ddpshim", *sys.argv[1:]])
    where = f"ddpshim {version.__version__}, {versions}. Beside this page: the output of each process."
    return f"# The same experiment: {_verdict(proof)}\n\n```\n$ {command}\n{text}\n```\n\n{where}\n"


def _verdict(proof: Proof) -> str:
    no = "no, by design" if proof.by_design else "unknown" if proof.is_unknown else "no"
    return "yes" if proof.is_same else no


def as_text(proof: Proof) -> str:
    """Return the notes and the verdict; if it is "no", also why, or the first difference and its usual cause."""
    lines = [*(f"note: {note}" for note in proof.notes), f"the same experiment: {_verdict(proof)}"]
    if proof.is_same:
        after = f"{count(proof.num_steps, 'step')} on {count(proof.num_ranks, 'rank')}"
        if proof.difference is not None:
            after += f"; then weights differ from the single-process ones by {proof.difference:.0e} of their size"
        lines += [f"  {said}" for said in (after, proof.speed, f"not compared: {_NEVER_COMPARED}") if said]
    elif proof.by_design:
        lines[-1] += ": data parallel ranks differ from one process in"
        lines += [
            *(f"  {own}" for own in proof.by_design),
            f"  {count(proof.num_steps, 'step')} on {count(proof.num_ranks, 'rank')} are right as far as that can be "
            "seen: batch sizes, weights at the start, gradients equal on all ranks, learning rates",
            f"  not compared: losses, weights after a step; {_NEVER_COMPARED}",
            "  for single-process numbers: the trainer without its own distribution by `python -m ddpshim run`, or "
            'ddpshim.setup(batch="global")',
        ]
    for parting in (*([proof.parting] if proof.parting else []), *proof.wrong):
        where = f" of {parting.where}" if parting.where else ""
        found = f"differs first in step {parting.step}" if parting is proof.parting else "wrong in one process too"
        lines.append(f"  {found}: {parting.what}{where}, {parting.place or 'outside your code'}")
        lines += [f"  found:   {parting.found}", f"  usually: {parting.meaning}"]
    return "\n".join(lines)
