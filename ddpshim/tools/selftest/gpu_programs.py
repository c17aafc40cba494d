"""Runs whole jobs for the self-test on GPUs: one whose ranks fail in four ways, and robomimic's trainer."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ddpshim.process import machine
from ddpshim.tools.selftest.failing import FAULTS

if TYPE_CHECKING:
    from ddpshim.tools.selftest.gpu import Check, Result
    from ddpshim.tools.selftest.running import Plan

_TIMEOUT_S = 30  # of the job that fails; after half of it, ranks look for the missing one
_START_S = 120.0  # imports, CUDA and nccl, on a busy machine
_NAMED_S = {"exception": 20.0, "out of memory": 20.0, "stop": 60.0, "kill": 60.0}
_END_S = 90.0
_NUM_LINES_SHOWN = 12
_LOOK_EVERY_S = 0.1
# The text by which the job names rank 1. Between the name and the reason no other rank may be named.
_FAILED = r"rank 1 \([^)\n]*\) failed:\n(?:(?!failed:)[\s\S])*?"
_NAMES = {
    "exception": _FAILED + "planted by the self-test",
    "out of memory": _FAILED + "(?:OutOfMemoryError|out of memory|can't allocate memory)",
    "stop": r"rank 1: gave no answer: its process \d+ is stopped \(by SIGSTOP\)",
    "kill": r"rank 1 failed first: it (?:was|ended)[^\n]*SIGKILL",
}
_NUM_STEPS = 10  # of robomimic


class _Job:
    """A running `python -m ddpshim run` of a program, with a folder for its output."""

    def __init__(self, folder: Path, nproc: int, options: list[str], program: list[str], **environ: str) -> None:
        self._folder = folder
        folder.mkdir()
        command = [sys.executable, "-m", "ddpshim", "run", "--nproc", str(nproc), "--log-dir", str(folder / "logs")]
        with (folder / "said.txt").open("wb") as said:
            self.process = subprocess.Popen(
                [*command, *options, *program],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ},
            )

    def said(self) -> str:
        """Return the output of the job and its ranks so far."""
        files = [self._folder / "said.txt", *sorted((self._folder / "logs").glob("rank_*.log"))]
        return "\n".join(file.read_text(errors="replace") for file in files if file.exists())

    def wait_for(self, is_so: Any, timeout_s: float) -> Optional[float]:
        """Return time.time() when `is_so()` became true; None if it did not within `timeout_s`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if is_so():
                return time.time()
            time.sleep(_LOOK_EVERY_S)
        return None

    def end(self) -> None:
        """End the job and kill its remaining ranks."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        for rank in self._folder.glob("process *"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(rank.read_text()), signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def failures(options: Plan, folder: Path, checks: list[Check]) -> Iterator[Result]:
    """Run one job that restarts after each fault: rank 1 raises, runs out of memory, stops, is killed."""
    from ddpshim.tools.selftest.gpu import FAILED, NOT_RUN, PASSED, Result

    own = folder / "failures"
    program = ["-m", "ddpshim.tools.selftest.failing", str(own)]
    restarts = ["--max-restarts", str(len(FAULTS) - 1), "--grace", "5"]
    job = _Job(
        own, options.nproc or 2, restarts, program, DDPSHIM_TIMEOUT_S=str(_TIMEOUT_S), **_gloo_if_shared(options)
    )
    faults = list(FAULTS)
    try:
        for number, check in enumerate(checks):
            result = Result(check.name, check.stage, check.proves, FAILED)
            begun = time.monotonic()
            planted = own / f"planted {check.name}"
            following = own / f"begun {faults[number + 1]} 0" if number + 1 < len(faults) else None
            error = _why_not_named(job, check.name, planted, following, result)
            result.seconds = time.monotonic() - begun
            if error is None:
                result.outcome = PASSED
            else:
                result.detail = f"{error} Report this with the file that --write makes.\n{_last_lines(job.said())}"
            yield result
            if error is not None:
                for other in checks[number + 1 :]:
                    yield Result(other.name, other.stage, other.proves, NOT_RUN, detail="the job did not get that far")
                return
    finally:
        job.end()


def _gloo_if_shared(options: Plan) -> dict[str, str]:
    import torch

    return {"DDPSHIM_BACKEND": "gloo"} if (options.nproc or 2) > torch.cuda.device_count() else {}


def _why_not_named(job: _Job, name: str, planted: Path, following: Optional[Path], result: Result) -> Optional[str]:
    """Return what went wrong after a fault; None if rank 1 was named and the job ended. Writes times into `result`."""
    if job.wait_for(lambda: planted.exists() or job.process.poll() is not None, _START_S) is None:
        return f"the job did not reach its planted fault within {_START_S:g} s of its start; a restart would hang."
    if not planted.exists():
        return f"the job ended with exit code {job.process.returncode} before its fault."
    started = planted.stat().st_mtime
    found = re.compile(_NAMES[name])
    named = job.wait_for(lambda: found.search(job.said()), _NAMED_S[name])
    if named is None:
        return f"rank 1 was not named within {_NAMED_S[name]:g} s; a user would have to guess which one failed."
    if name == "stop":  # the job does not end a stopped process, because it may be continued (SIGCONT)
        process = int(planted.read_text())
        if machine.state_of(process) == "T":
            os.kill(process, signal.SIGKILL)
    ended = job.wait_for(lambda: following.exists() if following else job.process.poll() is not None, _END_S)
    if ended is None:
        return f"rank 1 was named, but the other ranks were not gone {_END_S:g} s later; their GPUs would stay taken."
    if following is None and job.process.returncode == 0:
        return "the job ended with exit code 0; a scheduler would take it as finished."
    then = "the job was over" if following is None else "all ranks were started again"
    result.detail = f"named after {max(0.0, named - started):.1f} s, after {ended - started:.1f} s {then}"
    return None


def robomimic(options: Plan, folder: Path, checks: list[Check]) -> Iterator[Result]:
    """Run `python -m ddpshim check` on robomimic's trainer, with made-up data."""
    from ddpshim.tools.selftest.gpu import FAILED, NOT_RUN, PASSED, Result

    (check,) = checks
    missing = [package for package in ("robomimic", "h5py", "numpy") if importlib.util.find_spec(package) is None]
    if missing:
        yield Result(check.name, check.stage, check.proves, NOT_RUN, detail=f"{missing[0]} is not installed")
        return
    begun = time.monotonic()
    own = folder / "robomimic"
    own.mkdir()
    command = [sys.executable, "-m", "ddpshim", "check", "--json", "--nproc", str(options.nproc)]
    program = [
        "--steps",
        str(_NUM_STEPS),
        "-m",
        "robomimic.scripts.train",
        "--config",
        str(_config(own, 8 * (options.nproc or 1))),
    ]
    result = Result(check.name, check.stage, check.proves, FAILED)
    try:
        ran = subprocess.run(
            [*command, *program],
            cwd=own,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5 * options.timeout_s,
            check=False,
        )
        result.detail = _last_lines(ran.stderr)
        if ran.returncode in (0, 1) and ran.stdout.strip():
            proof = json.loads(ran.stdout)
            result.outcome = PASSED if proof["is_same"] else FAILED
            said = f"bc, {proof['num_steps']} steps: largest difference {proof['largest_difference']}"
            result.detail = said if proof["is_same"] else f"{said}; first difference: {proof['parting']}"
    except subprocess.TimeoutExpired:
        result.detail = f"not finished within {5 * options.timeout_s:g} s; give a longer --timeout"
    result.seconds = time.monotonic() - begun
    yield result


def _config(folder: Path, batch_size: int) -> Path:
    """Write random demonstrations and a config of bc into `folder`, and return the config's path."""
    h5py, numpy = importlib.import_module("h5py"), importlib.import_module("numpy")
    drawn = numpy.random.default_rng(0)
    with h5py.File(folder / "data.hdf5", "w") as file:
        every = file.create_group("data")
        env = {"env_name": "Lift", "env_version": "1.4.1", "type": 1, "env_kwargs": {}}
        every.attrs.update(total=200, env_args=json.dumps(env))
        for number in range(10):
            demo = every.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = 20
            demo["obs/object"], demo["actions"] = drawn.normal(size=(20, 6)), drawn.uniform(-1, 1, size=(20, 3))
            demo["rewards"], demo["dones"] = numpy.zeros(20), numpy.zeros(20)
            demo["states"] = numpy.zeros((20, 1))
    config: dict[str, Any] = {
        "algo_name": "bc",
        "experiment": {
            "name": "selftest",
            "validate": False,
            "epoch_every_n_steps": _NUM_STEPS,
            "rollout": {"enabled": False},
            "save": {"enabled": False},
            "logging": {"log_tb": False, "log_wandb": False},
        },
        "train": {
            "data": str(folder / "data.hdf5"),
            "output_dir": str(folder / "out"),
            "num_data_workers": 0,
            "batch_size": batch_size,
            "num_epochs": 1,
            "cuda": True,
        },
        "algo": {"actor_layer_dims": [64, 64]},
        "observation": {"modalities": {"obs": {"low_dim": ["object"]}}},
    }
    path = folder / "bc.json"
    path.write_text(json.dumps(config))
    return path


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_NUM_LINES_SHOWN:])
