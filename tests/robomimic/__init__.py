"""robomimic, DROID and their forks: patch sets, data, rollouts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
import torch

from evidence.equivalence import Run, copy_release, make_run_config, source, train

Trainer = Callable[..., Run]


def require(release: str) -> Path:
    """Return the tree of a release of robomimic; skip the test where it is not here."""
    tree = source(release)
    if tree is None:
        how = "pip install --no-deps robomimic==0.3.0" if release == "0.3.0" else "see patches/README.md"
        pytest.skip(f"robomimic {release} is neither installed nor under DDPSHIM_UPSTREAM ({how})")
    return tree


def kept(run: Trainer) -> Trainer:
    """Return `run`, which trains once for the same arguments, and keeps the run for who asks again."""
    runs: dict[str, Run] = {}

    def again(*arguments: Any, **options: Any) -> Run:
        name = json.dumps([arguments, options], sort_keys=True)
        if name not in runs:
            runs[name] = run(*arguments, **options)
        return runs[name]

    return again


def trainings(folder: Path, releases: Path, release: str, num_steps: int) -> Trainer:
    """Return a function that trains a variant, as `equivalence.train` does, once for the same arguments."""
    require(release)
    numbers = itertools.count()

    @kept
    def run(
        variant: str,
        num_ranks: Optional[int],
        *,
        release: str = release,
        patched: bool = True,
        precision: str = "float32",
        steps: Optional[int] = num_steps,
        epochs: int = 2,
        fault: str = "",
        module: str = "tests.observed",
        check: bool = True,
        forked: bool = True,
        has_agent: bool = False,
        **settings: Any,
    ) -> Run:
        tree = copy_release(release, releases, "patched" if patched else "plain")
        config = make_run_config(tree, release, variant, folder, steps, epochs, **settings)
        how: dict[str, Any] = {"module": module, "forked": forked, "has_agent": has_agent, "check": check}
        how["environ"] = {"DDPSHIM_FAULT": fault} if fault else {}
        return train(tree, config, folder / f"{variant}-{num_ranks}-{next(numbers)}", num_ranks, precision, **how)

    return run


def noted(run: Run) -> list[list[str]]:
    """Return what the environment of each rank wrote down: see tests/toy_env.py."""
    return [file.read_text().splitlines() for file in sorted(run.folder.glob("toy_env_*.txt"))]


def episodes(run: Run) -> list[list[tuple[float, ...]]]:
    """Return the initial draws of each rank's episodes."""
    return [[tuple(json.loads(line.split(" ", 1)[1])) for line in rank if line[0] == "e"] for rank in noted(run)]


def statistics(run: Run) -> list[dict[str, float]]:
    return [json.JSONDecoder().raw_decode(part)[0] for part in run.log.split("Env: Toy\n")[1:]]


def check_statistics(one: Run, other: Run) -> None:
    """Assert that the evaluations of two epochs found the same."""
    assert len(statistics(one)) == len(statistics(other)) == 2
    for before, after in zip(statistics(one), statistics(other)):
        assert list(after) == list(before) == ["Horizon", "Return", "Success_Rate", "Time_Episode", "time"]
        for key in ("Horizon", "Return", "Success_Rate"):
            assert after[key] == pytest.approx(before[key], rel=1e-6)


def check_weights(one: Run, other: Run) -> None:
    before, after = one.checkpoint["model"], other.checkpoint["model"]
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
