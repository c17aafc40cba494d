"""Compares the success in robosuite's Lift of policies from one process, from two ranks, and from two broken ranks.

Run it: DDPSHIM_UPSTREAM=… python -m evidence.simulator [--quick] [--write evidence/simulator.md]

Needs the packages in requirements/simulator.txt, and robomimic 0.4.0 under DDPSHIM_UPSTREAM. The patched release trains
on the ranks, and the published release plays the checkpoints.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from ddpshim.evaluation.intervals import exact
from evidence import pages
from evidence.compare import largest_difference
from evidence.equivalence import (
    DATA,
    NUM_SAMPLES_A_STEP,
    Run,
    _environ,
    batches,
    copy_release,
    make_config,
    make_data,
    train,
)

RELEASE = "0.4.0"
STEPS_AN_EPOCH = 20
DEADLINE_S = 1200  # of one training, on shared cores
START_SEED = 123  # of the environment in which checkpoints play
_RATE = "algo__optim_params__policy__learning_rate__initial"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "bc": {"algo__actor_layer_dims": [256, 256], _RATE: 1e-3},
    "bc_rnn_gmm": {"algo__rnn__hidden_dim": 64, "algo__gmm__min_std": 0.05, _RATE: 3e-3},
}


@dataclass(frozen=True)
class Arm:
    """A way to train: the number of ranks, and a fault (see tests/faults.py)."""

    name: str
    num_ranks: int
    fault: str = ""

    def environ(self, guard: bool) -> dict[str, str]:
        broken = {"DDPSHIM_FAULT": f"{self.fault}::0", **({} if guard else {"DDPSHIM_GUARD": "0"})}
        return {"OPENBLAS_NUM_THREADS": "1", **(broken if self.fault else {})}


ARMS = (
    Arm("one process", 1),
    Arm("2 ranks", 2),
    Arm("2 ranks, no gradient sync", 2, "no_sync"),
    Arm("2 ranks, same data on both", 2, "same_data"),
)


@dataclass(frozen=True)
class Plan:
    """The amount of training and playing."""

    algorithms: tuple[str, ...] = tuple(ALGORITHMS)
    steps: tuple[int, ...] = (800, 1400)
    seeds: tuple[int, ...] = (1, 2, 3)
    num_episodes: int = 20
    num_rollouts: int = 10  # episodes in the trainer's own rollouts
    horizon: int = 80  # demonstrations are 42 steps long on average
    world_sizes: tuple[int, ...] = (1, 2, 4)
    num_jobs: int = 2  # trainings, or processes that play, at a time

    @property
    def episodes(self) -> dict[str, int]:
        return {"num_episodes": self.num_episodes, "horizon": self.horizon, "seed": START_SEED}


QUICK = Plan(
    algorithms=("bc",), steps=(40, 60), seeds=(1,), num_episodes=2, num_rollouts=3, horizon=10, world_sizes=(1, 2)
)


def checkpoint(run: Run, steps: int) -> Path:
    """Return the checkpoint that a run wrote after `steps` gradient steps."""
    (found,) = run.folder.glob(f"out/*/*/models/model_epoch_{steps // STEPS_AN_EPOCH}.pth")
    return found


def train_arms(tree: Path, folder: Path, plan: Plan) -> dict[tuple[str, int, Arm], Run]:
    """Train every algorithm, seed and arm once, with a checkpoint after one epoch and after each of plan.steps."""
    epochs = [steps // STEPS_AN_EPOCH for steps in (STEPS_AN_EPOCH, *plan.steps)]

    def run(algorithm: str, seed: int, arm: Arm) -> Run:
        name = f"{algorithm}-{seed}-{ARMS.index(arm)}"
        (folder / name).mkdir(parents=True)
        extra = {**ALGORITHMS[algorithm], "experiment__save__epochs": epochs, "train__seed": seed}
        config = make_config(tree, algorithm, DATA, folder / name, STEPS_AN_EPOCH, epochs[-1], **extra)
        return train(
            tree, config, folder / name, arm.num_ranks, environ=arm.environ(guard=False), deadline_s=DEADLINE_S
        )

    keys = [(algorithm, seed, arm) for seed in plan.seeds for algorithm in plan.algorithms for arm in ARMS]
    with ThreadPoolExecutor(plan.num_jobs) as pool:
        return dict(zip(keys, pool.map(lambda key: run(*key), keys)))


def play(
    plain: Path, folder: Path, checkpoints: Sequence[Path], episodes: dict[str, int], num_jobs: int = 2
) -> dict[Path, dict[str, Any]]:
    """Play each checkpoint by tests/episodes.py and the release in `plain`; equal weights play only once."""
    alike = equal_weights(checkpoints)
    firsts = [paths[0] for paths in alike]

    def share(number: int) -> dict[str, Any]:
        file = folder / f"episodes_{number}.json"
        mine = [str(path) for path in firsts[number::num_jobs]]
        file.write_text(json.dumps({"checkpoints": mine, "episodes": episodes}))
        command = [sys.executable, "-m", "tests.episodes", str(file)]
        with file.with_suffix(".txt").open("w") as output:
            environ = {**_environ(plain), "OPENBLAS_NUM_THREADS": "1"}
            subprocess.run(command, env=environ, stdout=output, stderr=subprocess.STDOUT, check=True)
        return json.loads(file.with_suffix(".found.json").read_text())  # type: ignore[no-any-return]

    with ThreadPoolExecutor(num_jobs) as pool:
        found = {path: of for part in pool.map(share, range(num_jobs)) for path, of in part.items()}
    return {path: found[str(paths[0])] for paths in alike for path in paths}


def equal_weights(checkpoints: Iterable[Path]) -> list[list[Path]]:
    """Group the checkpoints by weights that are equal to the last bit."""
    alike: dict[tuple[bytes, ...], list[Path]] = {}
    for path in checkpoints:
        alike.setdefault(tuple(value.numpy().tobytes() for value in _weights(path).values()), []).append(path)
    return list(alike.values())


def _weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=False)["model"]  # type: ignore[no-any-return]


def detection(runs: dict[tuple[str, int, Arm], Run], plan: Plan) -> list[dict[str, Any]]:
    """Return, for each algorithm and arm, numbers that reveal a broken run: the largest values over the seeds."""
    rows = []
    for algorithm in plan.algorithms:
        for arm in ARMS:
            ours = [(runs[algorithm, seed, ARMS[0]], runs[algorithm, seed, arm]) for seed in plan.seeds]
            seen = {len(batch) for _, run in ours for batch in batches(run)}
            apart = {
                f"from one process, {steps}": max(
                    largest_difference(_weights(checkpoint(one, steps)), _weights(checkpoint(run, steps)))
                    for one, run in ours
                )
                for steps in (STEPS_AN_EPOCH, *plan.steps)
            }
            between = max(
                largest_difference(run.observed[0]["networks"], held["networks"])
                for _, run in ours
                for held in run.observed
            )
            samples = f"{min(seen)}" if len(seen) == 1 else f"{min(seen)} to {max(seen)}"
            rows.append({"algorithm": algorithm, "trained": arm.name, "between": between, "samples": samples, **apart})
    return rows


def guarded(tree: Path, folder: Path, algorithm: str = "bc") -> dict[str, str]:
    """Return, for each broken arm, the guards' error that ends its training; "" if there is none."""
    said = {}
    for arm in ARMS:
        if arm.fault:
            where = folder / f"guarded-{arm.fault}"
            where.mkdir()
            config = make_config(tree, algorithm, DATA, where, STEPS_AN_EPOCH, 1, **ALGORITHMS[algorithm])
            run = train(tree, config, where, arm.num_ranks, environ=arm.environ(guard=True), check=False)
            found = [line.strip() for line in run.log.splitlines() if "SyncError: " in line]
            said[arm.name] = found[0].split("SyncError: ")[1] if run.exit_code and found else ""
    return said


def rollouts(tree: Path, folder: Path, start: Optional[Path], plan: Plan) -> list[dict[str, Any]]:
    """Return the statistics of the patched trainer's own rollouts on 1, 2, … ranks; rewards are shaped.

    With the checkpoint `start`, which is not trained further, weights are equal to the last bit. If it is None, an
    epoch is trained from scratch, and weights are equal up to rounding.
    """
    import h5py

    data = make_data(folder)
    with h5py.File(data, "r+") as file:
        described = json.loads(file["data"].attrs["env_args"])
        described["env_kwargs"]["reward_shaping"] = True
        file["data"].attrs["env_args"] = json.dumps(described)
    settings = {
        **ALGORITHMS["bc"],
        "experiment__rollout__enabled": True,
        "experiment__rollout__n": plan.num_rollouts,
        "experiment__rollout__horizon": plan.horizon,
        "experiment__rollout__rate": 1,
        "experiment__render_video": False,
        **({} if start is None else {_RATE: 0.0}),
    }
    rows = []
    for num_ranks in plan.world_sizes:
        where = folder / f"rollouts-{'trained' if start is None else 'same'}-{num_ranks}"
        where.mkdir()
        config = make_config(tree, "bc", data, where, STEPS_AN_EPOCH, 1, **settings)
        environ = {"OPENBLAS_NUM_THREADS": "1", **({} if start is None else {"OBSERVED_START": str(start)})}
        run = train(tree, config, where, num_ranks, environ=environ)
        printed = json.JSONDecoder().raw_decode(run.log.split("Env: Lift\n")[1])[0]
        kept = {key: printed[key] for key in ("Return", "Success_Rate", "Horizon")}
        rows.append({"ranks": num_ranks, "episodes": plan.num_rollouts, **kept})
    return rows


def success_rows(found: Iterable[tuple[str, int, str, int, int]], num_episodes: int) -> list[dict[str, Any]]:
    """Return a row for each (algorithm, steps, arm) in `found`, which has (algorithm, steps, arm, seed, successes)."""
    cells: dict[tuple[str, int, str], dict[int, int]] = {}
    for algorithm, steps, arm, seed, successes in found:
        cells.setdefault((algorithm, steps, arm), {})[seed] = successes
    rows = []
    for (algorithm, steps, arm), by_seed in cells.items():
        total, played = sum(by_seed.values()), num_episodes * len(by_seed)
        lower, upper = exact(total, played)
        each = {f"seed {seed}": f"{successes}/{num_episodes}" for seed, successes in by_seed.items()}
        between = f"{100 * lower:.0f} to {100 * upper:.0f}%"
        one = {"algorithm": algorithm, "steps": steps, "trained": arm, **each}
        rows.append({**one, "total": f"{total}/{played}", "95%": between})
    return rows


def summary(success: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> str:
    """Return a summary of the two tables."""

    def successes(row: dict[str, Any]) -> tuple[int, int]:
        lifted, played = map(int, row["total"].split("/"))
        return lifted, played

    sums = []
    for arm in ARMS:
        counted = [successes(row) for row in success if row["trained"] == arm.name]
        lifted, played = (sum(column) for column in zip(*counted))
        lower, upper = exact(lifted, played)
        sums.append(f"- {arm.name}: {lifted} of {played} episodes ({100 * lower:.0f} to {100 * upper:.0f}%)")
    alone = {(row["algorithm"], row["steps"]): successes(row) for row in success if row["trained"] == ARMS[0].name}
    names = {arm.name for arm in ARMS if arm.fault}
    broken = [row for row in success if row["trained"] in names]
    overlapping = 0
    for row in broken:
        (low, high), (lower, upper) = exact(*successes(row)), exact(*alone[row["algorithm"], row["steps"]])
        overlapping += low <= upper and lower <= high
    early = f"from one process, {STEPS_AN_EPOCH}"
    good = max(row[early] for row in found if row["trained"] == ARMS[1].name)
    bad = min(row[early] for row in found if row["trained"] in names)
    arms = "\n".join(sums)
    return f"""{arms}

In {overlapping} of {len(broken)} rows the interval of a broken run overlaps that of one process, so success rates do
not detect it. Weights do after {STEPS_AN_EPOCH} steps: over the seeds, the largest difference from one process is
{good:.0e} with two ranks, and {bad:.0e} or more in broken runs."""


def measure(folder: Path, plan: Plan) -> dict[str, Any]:
    """Train and play everything; return the page's numbers."""
    tree, plain = copy_release(RELEASE, folder), copy_release(RELEASE, folder, "plain")
    runs = train_arms(tree, folder, plan)
    paths = {(*key, steps): checkpoint(run, steps) for steps in plan.steps for key, run in runs.items()}
    played = play(plain, folder, list(paths.values()), plan.episodes, plan.num_jobs)
    starts = {found["starts"] for found in played.values()}
    if len(starts) != 1:
        raise SystemExit(f"the episodes of {len(played)} checkpoints began in {len(starts)} ways, not in one")
    found = [
        (algorithm, steps, arm.name, seed, played[paths[algorithm, seed, arm, steps]]["successes"])
        for algorithm in plan.algorithms
        for steps in plan.steps
        for arm in ARMS
        for seed in plan.seeds
    ]
    last = plan.steps[-1]
    broken = [arm for arm in ARMS if arm.fault]
    pairs = [[paths[a, seed, arm, last] for arm in broken] for a in plan.algorithms for seed in plan.seeds]
    measured = {
        "controls alike": all(len(equal_weights(pair)) == 1 for pair in pairs),
        "success": success_rows(found, plan.num_episodes),
        "detection": detection(runs, plan),
        "guards": guarded(tree, folder),
        "same weights": rollouts(tree, folder, paths["bc", plan.seeds[0], ARMS[0], last], plan),
    }
    others = [f"{name} {importlib.metadata.version(name).split('+')[0]}" for name in ("robosuite", "mujoco", "torch")]
    measured["versions"] = ", ".join([f"robomimic {RELEASE}", *others, f"Python {sys.version.split()[0]}"])
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    measured["CPU minutes"] = (usage.ru_utime + usage.ru_stime) / 60
    (folder / "measured.json").write_text(json.dumps(measured, indent=1))
    return measured


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of all columns; floats are shown to the last digit."""
    shown = [{key: repr(value) if isinstance(value, float) else value for key, value in row.items()} for row in rows]
    return pages.table_of(shown, {key: key for key in rows[0]})


def same_statistics(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether rollouts have equal statistics, to the last digit, at every number of ranks."""
    return len({tuple(value for key, value in row.items() if key != "ranks") for row in rows}) == 1


def page(measured: dict[str, Any], command: str, plan: Plan) -> str:
    """Return the text of evidence/simulator.md."""
    success, found = measured["success"], measured["detection"]
    columns = {"algorithm": "algorithm", "trained": "trained on", "between": "between ranks"}
    columns |= {"samples": "samples a step"} | {key: key for key in found[0] if key.startswith("from one process")}
    guards = "\n".join(
        f"- {arm}: " + (f"ends. SyncError: {said}" if said else "not detected, because the ranks stay equal.")
        for arm, said in measured["guards"].items()
    )
    verdict = "equal to the last digit" if same_statistics(measured["same weights"]) else "**not** equal"
    alike = "\nThe two broken runs save exactly the same weights: in both, the main rank trains on its own shard.\n"
    alike = alike if measured["controls alike"] else ""
    return f"""# Success in the simulator

`{command}`, {measured["versions"]}, gloo on CPU; {measured["CPU minutes"]:.0f} minutes of CPU time.

The patched release trains on the 200 scripted Lift demonstrations in `examples/data`, with a global batch of
{NUM_SAMPLES_A_STEP}; the published release plays the policies in robosuite's Lift, without ddpshim. Two of the four
arms are broken on purpose, with the guards off: gradients are never reduced, and the main rank's model is saved; or
both ranks train on the main rank's shard.

{summary(success, found)}

## Success

Episodes in which the cube was lifted: {plan.num_episodes} for each checkpoint, of at most {plan.horizon} steps, from
the same start states. The interval (Clopper and Pearson) assumes independent episodes; those of one checkpoint are
not quite.

{_lines(success)}
{alike}
## How a broken run can be detected

The largest difference of a weight over the seeds, between the ranks at the end and from one process after so many
steps, and the distinct samples that all ranks together use in a step:

{pages.table_of(found, columns)}

With the guards on (bc, {STEPS_AN_EPOCH} steps):

{guards}

## Rollouts on all ranks

The patched trainer splits the episodes of its rollouts over the ranks. The environment has no seed and has shaped
rewards, so that the return depends on every step of every episode. From one checkpoint of bc, with bitwise equal
weights, the statistics are {verdict}:

{_lines(measured["same weights"])}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps and episodes: does it run")
    parser.add_argument("--folder", type=Path, help="keep the runs here; a new folder")
    parser.add_argument("--write", type=Path, help="the page to write")
    args = parser.parse_args()
    plan = QUICK if args.quick else Plan()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measured = measure(folder.resolve(), plan)
    where = "DDPSHIM_UPSTREAM=… " if os.environ.get("DDPSHIM_UPSTREAM") else ""
    text = page(measured, f"{where}python -m evidence.simulator {' '.join(sys.argv[1:])}", plan)
    print(text)
    if args.write:
        args.write.write_text(text)


if __name__ == "__main__":
    main()
