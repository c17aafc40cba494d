"""Compares the released robomimic trainer with the same under `ddpshim run` as a world of one, in alternation.

    python -m evidence.whole_run [--quick] [--only bc] [--nproc 2]

Both train the same config on the Lift demonstrations, unedited, and must end with the same weights. Both are started;
then they take turns: one runs for an epoch while the other is stopped (SIGSTOP), so that other programs slow both
alike. The time to the first step is measured with programs that train one step, one after the other, also by torchrun.
With `--nproc N` the released trainer takes turns with `run` on N ranks of one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evidence.compare import nested_difference
from evidence.equivalence import make_run_config, source
from evidence.results import Result, alternate, median_and_quartiles, ratio

ROOT = Path(__file__).resolve().parent.parent
RELEASE = "0.3.0"
DEADLINE_S = 240
_RNN = {"algo__rnn__horizon": 10, "algo__rnn__hidden_dim": 400, "train__seq_length": 10}
_SIZES = {"context_length": 10, "embed_dim": 128, "num_layers": 6, "num_heads": 8}
_TRANSFORMER = {**{f"algo__transformer__{name}": size for name, size in _SIZES.items()}, "train__frame_stack": 10}


@dataclass(frozen=True)
class Config:
    """The config to train; `steps` make an epoch of about half a second."""

    what: str
    variant: str
    settings: dict[str, Any]
    steps: int
    epochs: int = 12


CONFIGS = {
    "bc": Config("bc 256-256, batch 100", "bc", {"algo__actor_layer_dims": [256, 256]}, 300),
    "bc_large": Config(
        *("bc 1024-1024, batch 1000", "bc", {"algo__actor_layer_dims": [1024, 1024], "train__batch_size": 1000}, 30)
    ),
    "bc_rnn_gmm": Config("bc_rnn_gmm, LSTM 2 x 400, batch 100", "bc_rnn_gmm", _RNN, 15),
    "bc_transformer_gmm": Config(
        "bc_transformer_gmm, 6 layers of 128, batch 100", "bc_transformer_gmm", _TRANSFORMER, 4, epochs=32
    ),
    "bc_image": Config("bc, ResNet18, images of 32 x 32, batch 64", "bc_image_batchnorm", {"train__batch_size": 64}, 4),
}


class Trainer:
    """A training program with all its processes, which can be stopped and continued."""

    def __init__(self, command: Sequence[str], log: Path, **more: str) -> None:
        self._log = log
        path = os.pathsep.join([str(tree()), str(ROOT)])
        environ = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", **more}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # bytecode exists after `pip install`, too
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=log.parent, env=environ, stdout=file, stderr=file, start_new_session=True
            )

    def _pids(self) -> list[int]:
        """Return the process and its descendants, the innermost last; a launched rank is in its own session."""
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += [int(child) for child in task.read_text().split()]
        return found

    def stop(self) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def until(self, said: bytes) -> float:
        """Continue until `said` is in the output; return the seconds."""
        for pid in self._pids():
            os.kill(pid, signal.SIGCONT)
        start = time.perf_counter()
        while said not in self._log.read_bytes():
            if self.process.poll() is not None or time.perf_counter() - start > DEADLINE_S:
                raise RuntimeError(f"{self._log} without {said!r}:\n" + self._log.read_text()[-3000:])
            time.sleep(0.0005)
        return time.perf_counter() - start

    def end(self) -> None:
        """Wait until the program ends; kill it after a minute."""
        with contextlib.suppress(ProcessLookupError):
            for pid in self._pids():
                os.kill(pid, signal.SIGCONT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            for pid in self._pids():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()


def tree() -> Path:
    """Return the folder that contains the release's package."""
    found = source(RELEASE)
    if found is None:
        raise SystemExit(f"robomimic {RELEASE} is neither installed nor under DDPSHIM_UPSTREAM; see patches/README.md")
    return found


def _commands(config: Path, nproc: str = "1") -> dict[str, list[str]]:
    arguments = [str(tree() / "robomimic" / "scripts" / "train.py"), "--config", str(config)]
    return {
        "released": [sys.executable, *arguments],
        "ours": [sys.executable, "-m", "ddpshim", "run", "--nproc", nproc, *arguments],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
    }


def config_file(chosen: Config, folder: Path, epochs: int, steps: int) -> Path:
    """Write the config file, made from the release's own template, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    return make_run_config(tree(), RELEASE, chosen.variant, folder, steps, epochs, **chosen.settings)


def _difference(one: Path, other: Path) -> str:
    """Return a text about the difference of the weights that two runs have saved last."""
    newest = (max(folder.glob("out/**/*.pth"), key=lambda path: path.stat().st_mtime) for folder in (one, other))
    far = nested_difference(*(torch.load(path, weights_only=False)["model"] for path in newest))
    return "trained weights equal to the last bit" if far == 0 else f"trained weights within {far:.1g}"


def seconds_of_epochs(name: str, folder: Path, epochs: int, doors: dict[str, dict[str, str]]) -> dict[str, list[float]]:
    """Return the seconds of each door's epochs, which alternate. `doors`: its command, and variables."""
    chosen = CONFIGS[name]
    arms: dict[str, Trainer] = {}
    try:
        for arm, given in doors.items():
            config, more = config_file(chosen, folder / name / arm, epochs + 1, chosen.steps), {**given}
            arms[arm] = Trainer(
                _commands(config, more.pop("nproc", "1"))[more.pop("by")], config.parent / "log.txt", **more
            )
            arms[arm].until(b"Train Epoch 1\n")
            arms[arm].stop()
        done = dict.fromkeys(arms, 2)

        def one_epoch(arm: str) -> float:
            number, done[arm] = done[arm], done[arm] + 1
            seconds = arms[arm].until(b"Train Epoch %d\n" % number)
            arms[arm].stop()
            return seconds

        return alternate({arm: (lambda arm=arm: one_epoch(arm)) for arm in arms}, epochs)
    finally:
        for trainer in arms.values():
            trainer.end()


def on_ranks(name: str, folder: Path, epochs: int, num_ranks: int) -> Iterator[Result]:
    """Yield the time of a step on ranks over the released one's."""
    doors = {
        "released": {"by": "released"},
        "ours": {"by": "ours", "nproc": str(num_ranks), "OMP_NUM_THREADS": "1"},
    }
    found = seconds_of_epochs(name, folder, epochs, doors)
    ms = {arm: 1000 * median_and_quartiles(found[arm])[0] / CONFIGS[name].steps for arm in doors}
    note = ", ".join(f"{arm} {ms[arm]:.3g} ms a step" for arm in doors)
    value, quartiles = ratio(found["ours"], found["released"])
    what = f"a step on {num_ranks} ranks, {CONFIGS[name].what}"
    yield Result("whole_run", what, value, "x released", quartiles, note=note)


def steps_a_second(name: str, folder: Path, epochs: int) -> Iterator[Result]:
    """Yield the ratio of steps per second, launched over released; their epochs alternate."""
    chosen, doors = CONFIGS[name], {arm: {"by": arm} for arm in ("released", "ours")}
    found = seconds_of_epochs(name, folder, epochs, doors)
    value, quartiles = ratio(found["released"], found["ours"])
    seconds = {arm: median_and_quartiles(found[arm])[0] / chosen.steps for arm in doors}
    note = (
        f"{1 / seconds['ours']:.4g} and {1 / seconds['released']:.4g} steps a second; "
        f"{(epochs + 1) * chosen.steps} steps, "
        f"{_difference(folder / name / 'released', folder / name / 'ours')}"
    )
    yield Result("whole_run", f"steps a second, {chosen.what}", value, "x released", quartiles, at_least=1.0, note=note)


def first_step(folder: Path, rounds: int) -> Iterator[Result]:
    """Yield the time from the command to the first step: released, under torchrun, and launched by ddpshim."""

    def seconds(arm: str) -> float:
        own = folder / "start" / arm
        shutil.rmtree(own, ignore_errors=True)
        config = config_file(CONFIGS["bc"], own, epochs=1, steps=1)
        start = time.perf_counter()
        trainer = Trainer(_commands(config)[arm], own / "log.txt")
        try:
            trainer.until(b"Train Epoch 1\n")
            return time.perf_counter() - start
        finally:
            trainer.end()

    found = alternate({arm: (lambda arm=arm: seconds(arm)) for arm in ("released", "ours", "torchrun")}, rounds)
    later = [ours - released for ours, released in zip(found["ours"], found["released"])]
    value, quartiles = median_and_quartiles(later)
    middle = {arm: median_and_quartiles(found[arm])[0] for arm in found}
    note = ", ".join(f"{arm} {middle[arm]:.3g} s" for arm in found)
    what = "from the command to the first step, bc 256-256"
    yield Result("whole_run", what, value, "s after the released one", quartiles, at_most=0.3, note=note)
    value, quartiles = ratio(found["ours"], found["torchrun"])
    yield Result("whole_run", what, value, "x torchrun", quartiles, at_most=1.0)


def run(quick: bool = False, only: Sequence[str] = (), num_ranks: int = 1) -> Iterator[Result]:
    """Yield the steps a second of each config, and the time to the first step; on several ranks the time of a step."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in only or (("bc", "bc_rnn_gmm") if quick else CONFIGS):
            epochs = 4 if quick or name == "start" else CONFIGS[name].epochs
            if num_ranks > 1:
                yield from on_ranks(name, folder, epochs, num_ranks)
            elif name != "start":
                yield from steps_a_second(name, folder, epochs)
        if num_ranks == 1 and (not only or "start" in only):
            yield from first_step(folder, 1 if quick else 4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two configs, and fewer epochs")
    parser.add_argument("--only", nargs="+", default=[], choices=[*CONFIGS, "start"])
    parser.add_argument("--nproc", type=int, default=1)
    args = parser.parse_args()
    for result in run(args.quick, args.only, args.nproc):
        print(result, flush=True)
