"""robomimic, DROID and their forks: patch sets, data, rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from evidence.equivalence import Run, copy_release, make_config, make_data, source, train

Trainer = Callable[..., Run]


def require(release: str) -> Path:
    """Return the tree of a release of robomimic; skip the test where it is not here."""
    tree = source(release)
    if tree is None:
        how = "pip install --no-deps robomimic==0.3.0" if release == "0.3.0" else "see patches/README.md"
        pytest.skip(f"robomimic {release} is neither installed nor under DDPSHIM_UPSTREAM ({how})")
    return tree


def trainings(folder: Path, releases: Path, release: str, num_steps: int) -> Trainer:
    """Return a function that trains a variant, as `equivalence.train` does, and keeps the run for who asks again."""
    require(release)
    kept: dict[str, Run] = {}

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
        of_rank = f"{variant}-{num_ranks}-{patched}-{precision}-{steps}-{epochs}-{fault}-{module}-{forked}-{has_agent}"
        name = f"{release}-{of_rank}-{json.dumps(settings, sort_keys=True)}"
        if name not in kept:
            tree = copy_release(release, releases, "patched" if patched else "plain")
            data = make_data(folder, num_demos=50)
            of_robocasa = {"lang": "lift it"} if release == "robocasa" else {}
            several = [{"path": str(data), **of_robocasa}]
            settings.setdefault("train__data", str(data) if release < "0.5" else several)
            config = make_config(tree, variant, data, folder, steps, epochs, **settings)
            environ = {"DDPSHIM_FAULT": fault} if fault else {}
            here = folder / f"{variant}-{num_ranks}-{len(kept)}"
            how: dict[str, Any] = {"module": module, "forked": forked, "has_agent": has_agent}
            kept[name] = train(tree, config, here, num_ranks, precision, environ, check, **how)
        return kept[name]

    return run


def written_down(run: Run) -> list[list[str]]:
    """Return what the environment of each rank wrote: see tests/toy_env.py."""
    return [file.read_text().splitlines() for file in sorted(run.folder.glob("toy_env_*.txt"))]


def episodes(run: Run) -> list[list[tuple[float, ...]]]:
    """Return the initial draws of each rank's episodes."""
    return [[tuple(json.loads(line.split(" ", 1)[1])) for line in rank if line[0] == "e"] for rank in written_down(run)]


def statistics(run: Run) -> list[dict[str, float]]:
    return [json.JSONDecoder().raw_decode(part)[0] for part in run.log.split("Env: Toy\n")[1:]]


def check_statistics(one: Run, other: Run) -> None:
    """Assert that the evaluations of two epochs found the same."""
    assert len(statistics(one)) == len(statistics(other)) == 2
    for before, after in zip(statistics(one), statistics(other)):
        assert list(after) == list(before) == ["Horizon", "Return", "Success_Rate", "Time_Episode", "time"]
        for key in ("Horizon", "Return", "Success_Rate"):
            assert after[key] == pytest.approx(before[key], rel=1e-6)
