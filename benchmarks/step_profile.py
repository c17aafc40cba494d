"""Measures the parts of a step of the released robomimic trainer, in one process and launched by ddpshim, by config.

    python -m benchmarks.step_profile [--write evidence/whole_run.md]

Measures CPU time of the training thread (torch uses one thread), so other programs do not count. A part's time excludes
the other parts that it calls. The first epoch is left out.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Callable

from benchmarks.results import alternate
from benchmarks.whole_run import CONFIGS, ROOT, config_file, script, tree
from evidence import pages
from tests.preloaded import as_torchrun_says

BEGIN, END = "<!-- step profile -->", "<!-- end of step profile -->"
PARTS = {
    "data": "next batch",
    "process": "batch to the network's inputs",
    "train": "forward and loss",
    "backward": "backward",
    "norms": "clearing gradients, reading their norms",
    "optimizer": "optimizer",
    "ema": "moving average of weights",
    "log": "numbers for the log",
    "loop": "the rest of the loop",
}
STEPS, EPOCHS, ROUNDS = {"bc": 100, "bc_large": 10, "bc_rnn_gmm": 10, "bc_transformer_gmm": 10}, 3, 3
STEPS["diffusion_policy"] = 3


class Clock:
    """Measures this thread's CPU time by part, each without the parts inside it."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self._inside: list[str] = []
        self._last = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._inside.append(name)
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def _turn(self) -> None:
        now = time.thread_time()
        if self._inside:
            self.spent[self._inside[-1]] += now - self._last
        self._last = now

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed


class _Timed:
    """A loader whose batches are timed."""

    def __init__(self, loader: Any, clock: Clock) -> None:
        self._loader, self._clock = loader, clock

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        with self._clock.part("data"):
            batches = iter(self._loader)
        end = object()
        while True:
            with self._clock.part("data"):
                batch = next(batches, end)
            if batch is end:
                return
            yield batch


def follow(arm: str, found: str, *program: str) -> None:
    """Run the trainer in this process, and write the times of a step's parts to the file `found`."""
    import torch

    clock, set_num_threads = Clock(), torch.set_num_threads

    def begin(number: int) -> None:  # the trainer calls it when all modules are imported
        import robomimic.utils.torch_utils as TorchUtils
        import robomimic.utils.train_utils as TrainUtils

        set_num_threads(1)
        torch.set_num_threads = set_num_threads
        torch.Tensor.backward = clock.timed("backward", torch.Tensor.backward)  # type: ignore[method-assign]
        for kind in (torch.optim.Adam, torch.optim.AdamW):  # AdamW may inherit Adam's: do not time it twice
            if "step" in vars(kind):
                kind.step = clock.timed("optimizer", kind.step)  # type: ignore[method-assign]
        averaging = sys.modules.get("diffusers.training_utils")
        if averaging is not None:
            averaging.EMAModel.step = clock.timed("ema", averaging.EMAModel.step)
        run_epoch = TrainUtils.run_epoch

        def timed_epoch(model: Any, data_loader: Any, epoch: int, **options: Any) -> Any:
            if epoch == 1:
                return run_epoch(model=model, data_loader=data_loader, epoch=epoch, **options)
            names = {"train_on_batch": "train", "log_info": "log"}
            names.update(process_batch_for_training="process", postprocess_batch_for_training="process")
            clock.steps += options["num_steps"]
            with contextlib.ExitStack() as undo:
                for owner, name, part in [
                    *((model, name, part) for name, part in names.items()),
                    (TorchUtils, "backprop_for_loss", "norms"),
                ]:
                    undo.callback(setattr, owner, name, getattr(owner, name))
                    setattr(owner, name, clock.timed(part, getattr(owner, name)))
                undo.enter_context(clock.part("loop"))
                return run_epoch(model=model, data_loader=_Timed(data_loader, clock), epoch=epoch, **options)

        TrainUtils.run_epoch = timed_epoch

    torch.set_num_threads = begin

    @atexit.register
    def write() -> None:
        each = {name: 1000 * seconds / max(1, clock.steps) for name, seconds in clock.spent.items()}
        Path(found).write_text(json.dumps(each))

    if arm == "ours":
        from ddpshim.launch import rank

        rank.main(program)
    else:
        sys.argv = [*program]
        runpy.run_path(program[0], run_name="__main__")


def measure(name: str, arm: str, folder: Path) -> dict[str, float]:
    """Return the milliseconds per step, by part."""
    shutil.rmtree(folder, ignore_errors=True)
    config, found = config_file(CONFIGS[name], folder, EPOCHS, STEPS[name]), folder / "found.json"
    code = "import sys; from benchmarks import step_profile; step_profile.follow(*sys.argv[1:])"
    release = CONFIGS[name].release
    command = [sys.executable, "-c", code, arm, str(found), str(script(release)), "--config", str(config)]
    path = os.pathsep.join([str(tree(release)), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": path, **(as_torchrun_says(1)[0] if arm == "ours" else {})}
    log = folder / "log.txt"
    with log.open("wb") as file:
        subprocess.run(command, cwd=folder, env=environ, stdout=file, stderr=file, timeout=600, check=False)
    if not found.exists() or "finished run successfully" not in log.read_text():
        raise RuntimeError(log.read_text()[-3000:])
    return dict(json.loads(found.read_text()))


def table(name: str, rounds: int) -> str:
    """Return the table of a step's parts for one config, for both arms."""
    with tempfile.TemporaryDirectory() as folder:
        each: dict[str, list[dict[str, float]]] = {"released": [], "ours": []}

        def once(arm: str) -> float:
            each[arm].append(measure(name, arm, Path(folder, arm)))
            return 0.0

        alternate({arm: functools.partial(once, arm) for arm in each}, rounds)
    middle = {arm: {part: median(found[part] for found in runs) for part in PARTS} for arm, runs in each.items()}
    lines = [f"### {CONFIGS[name].what}", "", "| ms of CPU per step | released | ddpshim |", "| --- | ---: | ---: |"]
    there = [part for part in PARTS if middle["released"][part] or middle["ours"][part]]
    lines += [f"| {PARTS[p]} | {middle['released'][p]:.3f} | {middle['ours'][p]:.3f} |" for p in there]
    sums = {arm: sum(parts.values()) for arm, parts in middle.items()}
    return "\n".join([*lines, f"| **all** | **{sums['released']:.3f}** | **{sums['ours']:.3f}** |", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*CONFIGS], choices=[*CONFIGS])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="the median of so many runs of each")
    parser.add_argument("--write", type=Path, help="a page with the two marks between which the tables go")
    args = parser.parse_args()
    tables = "\n".join(table(name, args.rounds) for name in args.only)
    print(tables)
    if args.write:
        pages.fill(args.write, BEGIN, f"\n{tables}\n", END)


if __name__ == "__main__":
    main()
