"""Compares N ranks of the patched robomimic with the release: neither patched nor launched, with its noise.

Run it: python -m evidence.equivalence --release 0.3.0 --algo all --ranks 2,3,4 [--write evidence/equivalence.md]

The release is copied beside the results, and patched there: the installed package does not change.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

from ddpshim.trainers import patching
from evidence import pages
from evidence.compare import largest_difference
from evidence.variants import IMAGE_KEY, IMAGE_SIZE, VARIANTS, WHY, is_shipped
from tests.preloaded import as_torchrun_says, preloaded, start_afresh
from tests.preloaded import environment as _environ

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples" / "data" / "lift_scripted200_train.hdf5"
RUN_DEADLINE_S = 300
VALIDATION = {
    "experiment__validate": True,
    "experiment__validation_epoch_every_n_steps": 3,
    "train__hdf5_filter_key": "train",
    "train__hdf5_validation_filter_key": "valid",
}
NUM_SAMPLES_A_STEP = 100  # the batch size of variants that do not set it; 3 ranks do not divide it
TOLERANCE = 1e-5  # float32, after 20 steps
UNEXPLAINED = "**unexplained** "


@dataclass
class Run:
    """One training: each rank's samples and final networks, in rank order, and the folder and output of the run."""

    observed: list[dict[str, Any]]
    folder: Path
    log: str
    exit_code: int

    @property
    def checkpoint(self) -> dict[str, Any]:
        """The newest checkpoint."""
        newest = max(self.folder.glob("out/*/*/models/*.pth"), key=lambda path: path.stat().st_mtime)
        return torch.load(newest, weights_only=False)  # type: ignore[no-any-return]

    def metrics(self, phase: str = "Train") -> list[dict[str, float]]:
        """Return the metrics that the trainer printed for each epoch."""
        parts = self.log.split(f"\n{phase} Epoch ")[1:]
        # Where every rank prints, two may print their headings before both print their metrics.
        return [json.JSONDecoder().raw_decode(part[part.index("{") :])[0] for part in parts if "{" in part]

    def losses(self, phase: str = "Train") -> list[float]:
        """Return the loss that the trainer printed for each epoch."""
        return [epoch["Loss"] for epoch in self.metrics(phase)]

    @property
    def batch_size(self) -> int:
        return int(json.loads((self.folder / "config.json").read_text())["train"]["batch_size"])


def source(release: str) -> Optional[Path]:
    """Return the folder with the `robomimic` package of a release, or None if it is not available."""
    upstream = os.environ.get("DDPSHIM_UPSTREAM")
    if upstream and (Path(upstream) / f"robomimic-{release}" / "robomimic").is_dir():
        return Path(upstream) / f"robomimic-{release}"
    spec = importlib.util.find_spec("robomimic")
    if spec is None or spec.origin is None:
        return None
    installed = Path(spec.origin).parent.parent
    said = f'__version__ = "{release}"' in (installed / "robomimic" / "__init__.py").read_text()
    return installed if said else None


def copy_release(release: str, folder: Path, way: str = "patched") -> Path:
    """Copy a release's package under `folder`, to run it in one of the ways of `tests.trainer`."""
    found = source(release)
    if found is None:
        raise SystemExit(f"robomimic {release} is neither installed nor under DDPSHIM_UPSTREAM; see patches/README.md")
    tree = folder / f"robomimic-{release}-{way}"
    if not tree.exists():
        for package in ("robomimic", "act"):  # act is a submodule of robocasa's branch
            if (found / package).is_dir():
                shutil.copytree(found / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
        (patching.apply if way == "patched" else patching.revert)(str(tree))
    return tree


def make_data(folder: Path, num_demos: int = 200, images: bool = False) -> Path:
    """Write the Lift demonstrations with `next_obs`, which value-based algorithms need, and images of noise."""
    import h5py

    path = folder / f"lift_{num_demos}{'_images' if images else ''}.hdf5"
    if path.exists():
        return path
    random = np.random.default_rng(0)
    with h5py.File(DATA) as given, h5py.File(path, "w") as made:
        made.create_group("data").attrs.update(given["data"].attrs)
        for number in range(num_demos):
            name = f"demo_{number}"
            given.copy(f"data/{name}", made["data"])
            obs = made[f"data/{name}/obs"]
            if images:
                shape = (len(obs["object"]), IMAGE_SIZE, IMAGE_SIZE, 3)
                obs.create_dataset(IMAGE_KEY, data=random.integers(0, 256, shape, dtype=np.uint8))
            for key, value in obs.items():
                shifted = value[()][[*range(1, len(value)), len(value) - 1]]
                made.create_dataset(f"data/{name}/next_obs/{key}", data=shifted)
        if "mask" in given:
            kept = {f"demo_{number}" for number in range(num_demos)}
            for key, names in given["mask"].items():
                made.create_dataset(f"mask/{key}", data=[n for n in names[()] if n.decode() in kept])
    return path


def make_config(
    tree: Path, variant: str, data: Path, folder: Path, steps: Optional[int], epochs: int, **extra: Any
) -> Path:
    """Write a config file from the release's own template; `extra` overrides by dotted path ('__' for '.')."""
    template, changes = VARIANTS[variant]
    config = json.loads((tree / "robomimic" / "exps" / "templates" / f"{template}.json").read_text())
    settings = {
        "experiment.name": variant,
        "experiment.validate": False,
        "experiment.rollout.enabled": False,
        "experiment.epoch_every_n_steps": steps,
        "experiment.save.every_n_epochs": epochs,
        "experiment.logging.log_wandb": False,
        "train.data": str(data),
        "train.output_dir": str(folder / "out"),
        "train.num_epochs": epochs,
        "train.num_data_workers": 0,
        "train.batch_size": NUM_SAMPLES_A_STEP,
        "train.cuda": False,
        "train.seed": 1,
        **changes,
        **{key.replace("__", "."): value for key, value in extra.items()},
    }
    set_dotted(config, settings)
    if (tree / "robomimic" / "algo" / "act.py").exists():
        _complete_for_robocasa(config)
    made = folder / f"{variant}.json"
    made.write_text(json.dumps(config))
    return made


def set_dotted(config: dict[str, Any], settings: dict[str, Any]) -> None:
    """Change `config` by settings whose names are dotted paths."""
    for dotted, value in settings.items():
        *path, last = dotted.split(".")
        section = config
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value


def _complete_for_robocasa(config: dict[str, Any]) -> None:
    """Add settings that robocasa's branch requires but its templates lack: it refuses an empty schedule."""
    config["train"].setdefault("action_config", {"actions": {"normalization": None}})
    sections = [config["algo"]]
    for section in sections:
        sections += [value for value in section.values() if isinstance(value, dict)]
        if section.get("epoch_schedule") == []:
            section["epoch_schedule"] = [5]  # in steps: robocasa's schedules advance with each step


def train(
    tree: Path,
    config: Path,
    folder: Path,
    num_ranks: Optional[int],
    precision: str = "float32",
    environ: Optional[dict[str, str]] = None,
    check: bool = True,
    module: str = "tests.observed",
    deadline_s: float = RUN_DEADLINE_S,
    forked: bool = False,
    has_agent: bool = False,
    options: Sequence[str] = (),
) -> Run:
    """Train once: under torchrun on `num_ranks` processes; if None, without a launcher.

    `forked`: fork the processes from one that has imported the trainer, without a launcher, or with `has_agent` under
    torchrun. Forks start at once; a new interpreter takes seconds for every rank. `options`: further arguments of the
    trainer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(config.read_text())
    settings["train"]["output_dir"] = str(folder / "out")
    own = folder / "config.json"
    own.write_text(json.dumps(settings))
    observe = [str(folder), precision] if module == "tests.observed" else []
    argv = [module, *observe, "--config", str(own), *options]
    if num_ranks is not None and (has_agent or not forked):
        argv = ["torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", "-m", *argv]
    if forked:
        started = None if has_agent else num_ranks
        code, log = fork(tree, argv, folder, started, environ or {}, deadline_s)
    else:
        code, log = start_afresh(["-m", *argv], {**_environ(tree), **(environ or {})}, folder, deadline_s)
    ranks = ["plain"] if num_ranks is None else range(num_ranks)
    files = [folder / f"observed_{rank}.pt" for rank in ranks]
    if check and (code or (observe and not all(f.exists() for f in files))):
        raise RuntimeError(f"training in {folder} ended with {code}:\n{log[-6000:]}")
    observed = [torch.load(f, weights_only=False) for f in files if f.exists()]
    return Run(observed, folder, log, code)


def fork(
    tree: Optional[Path],
    argv: list[str],
    folder: Path,
    num_ranks: Optional[int],
    environ: dict[str, str],
    deadline_s: float,
) -> tuple[int, str]:
    """Run `python -m argv[0] …` on `num_ranks` forked ranks (None: no launcher); return exit code and output."""
    ranks = [{}] if num_ranks is None else as_torchrun_says(num_ranks)
    commands = [(argv, {**_environ(tree), **environ, **rank}) for rank in ranks]
    (folder / "output.txt").unlink(missing_ok=True)
    code = preloaded(tree).start(commands, folder).wait(deadline_s)
    return code, (folder / "output.txt").read_text()


def make_run_config(
    tree: Path, release: str, variant: str, folder: Path, steps: Optional[int], epochs: int, **extra: Any
) -> Path:
    """Write the config of a variant with suitable data, in the release's form; return its path."""
    images = "observation.modalities.obs.rgb" in VARIANTS[variant][1]
    data = make_data(folder, num_demos=10 if images else 50, images=images)
    described = {"path": str(data), **({"lang": "lift the cube"} if release == "robocasa" else {})}
    as_release: Any = [described] if release >= "0.5" else str(data)
    return make_config(tree, variant, data, folder, steps, epochs, train__data=as_release, **extra)


def train_all(tree: Path, jobs: Sequence[tuple[Path, Path, Optional[int]]], precision: str = "float32") -> list[Run]:
    """Train each (config, folder, number of ranks) one after the other, by ranks forked from one process."""
    runs = []
    for config, folder, num_ranks in jobs:
        start = time.monotonic()
        runs.append(train(tree, config, folder, num_ranks, precision, check=False, forked=True))
        line = f"{time.monotonic() - start:5.1f} s  exit code {runs[-1].exit_code}  {folder.name}"
        print(line, file=sys.stderr, flush=True)
    return runs


def loads_unpatched(tree: Path, runs: Sequence[Run]) -> dict[Path, str]:
    """Return, for each run, "yes" if the release in `tree` loads its checkpoint with equal weights, else the error."""
    newest = {
        run.folder: str(max(run.folder.glob("out/*/*/models/*.pth"), key=lambda p: p.stat().st_mtime)) for run in runs
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "paths.json").write_text(json.dumps(list(newest.values())))
        code, log = fork(tree, ["tests.observed", "--load", "paths.json"], folder, None, {}, RUN_DEADLINE_S)
        if code:
            raise RuntimeError(f"loading ended with {code}:\n{log[-6000:]}")
        found = json.loads((folder / "paths.found.json").read_text())
    return {folder: found[path] for folder, path in newest.items()}


def difference(one: Run, other: Run) -> dict[str, Any]:
    """Return how `other` differs from `one`, the release's run with the same config."""
    weights = [observed["networks"] for observed in other.observed]
    start = one.observed[0]["initial"]
    kinds = {"ema": ".ema.", "target networks": "_target"}
    of_kind = {kind: [key for key in start if mark in key] for kind, mark in kinds.items()}
    of_kind["networks"] = [key for key in start if not any(mark in key for mark in kinds.values())]

    def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], kind: str) -> Optional[float]:
        keys = of_kind[kind]
        return largest_difference({k: a[k] for k in keys}, {k: b[k] for k in keys}) if keys else None

    alone = one.observed[0]["networks"]
    return {
        "algorithm": other.folder.name.split("-")[0],
        "ranks": len(weights),
        "steps": len(other.observed[0]["batches"]["Train"]),
        "moved": largest(start, alone, "networks"),
        **{kind: largest(alone, weights[0], kind) for kind in ("networks", "target networks", "ema")},
        "moments": largest_difference(one.observed[0]["moments"], other.observed[0]["moments"]),
        "start": max(largest_difference(start, observed["initial"]) for observed in other.observed),
        "between ranks": max(largest_difference(weights[0], held) for held in weights),
        "loss": max(
            abs(a[key] - b[key]) / max(1.0, abs(a[key]))
            for phase in ("Train", "Validation")
            for a, b in zip(one.metrics(phase), other.metrics(phase))
            for key in a
            if not key.startswith("Time_")
        ),
        "same samples": all(observed["batches"] == one.observed[0]["batches"] for observed in other.observed),
        "same states": all(
            torch.equal(observed["states"]["torch"], one.observed[0]["states"]["torch"])
            and np.array_equal(observed["states"]["numpy"][1], one.observed[0]["states"]["numpy"][1])
            for observed in other.observed
        ),
        "checkpoint keys": _keys(other.checkpoint["model"]) == _keys(one.checkpoint["model"]),
    }


def compare(
    release: str,
    variants: Sequence[str],
    ranks: Sequence[int],
    folder: Path,
    precision: str = "float32",
    steps: Optional[int] = 10,
    epochs: int = 2,
    releases: Optional[Path] = None,
    way: str = "patched",
) -> list[dict[str, Any]]:
    """Return a row for each variant and number of ranks: how the run differs from the unchanged release.

    `releases`: the folder with copies of the release, if not `folder`.
    """
    tree = copy_release(release, releases or folder, way)
    plain = copy_release(release, releases or folder, "plain")
    sizes = {v: 25 if "train.batch_size" in VARIANTS[v][1] else NUM_SAMPLES_A_STEP for v in variants}
    validates = {} if release == "robocasa" else VALIDATION  # its own validation fails on a list of data
    made = {
        v: make_run_config(tree, release, v, folder, steps, epochs, train__batch_size=sizes[v], **validates)
        for v in variants
    }
    jobs: list[Any] = [(made[v], folder / f"{v}-plain-{precision}", None) for v in variants]
    alone = dict(zip(variants, train_all(plain, jobs, precision)))
    keys = [(v, n) for v in variants for n in ranks]
    runs = dict(zip(keys, train_all(tree, [(made[v], folder / f"{v}-{n}-{precision}", n) for v, n in keys], precision)))
    for run in (*alone.values(), *runs.values()):
        if not [*run.folder.glob("out/*/*/models/*.pth")]:
            run.exit_code = 1  # upstream prints the exception, and exits with 0
    loaded = loads_unpatched(plain, [run for run in (*alone.values(), *runs.values()) if not run.exit_code])
    rows: list[dict[str, Any]] = []
    for variant in variants:
        one = alone[variant]
        if one.exit_code:
            rows.append(
                {"algorithm": variant, "failed": f"the release itself fails: {_last_line(one)}", "upstream": True}
            )
            continue
        for n in ranks:
            run = runs[variant, n]
            if run.exit_code:
                failed = f"failed: {_last_line(run)}"
                rows.append({"algorithm": variant, "ranks": n, "failed": failed, "upstream": False})
            else:
                rows.append({**difference(one, run), "unpatched loads it": loaded[run.folder]})
    return rows


def _last_line(run: Run) -> str:
    return ([line for line in run.log.splitlines() if line.strip()] or [""])[-1]


def _keys(tree: Any) -> Any:
    return {key: _keys(value) for key, value in tree.items()} if isinstance(tree, dict) else None


def deviations(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each row with a deviation; those without an explanation begin with UNEXPLAINED."""
    out = []
    for row in rows:
        if "failed" in row:
            by_us = f"{UNEXPLAINED}{row['algorithm']}, {row.get('ranks')} ranks: {row['failed']}"
            out.append(f"{row['algorithm']}: {row['failed']}" if row["upstream"] else by_us)
            continue
        where = f"{row['algorithm']}, {row['ranks']} ranks"
        wrong = [f"{key} {row[key]:.1e}" for key in ("start", "between ranks") if row[key]]
        if not row["moved"]:
            wrong.append("nothing was trained")
        wrong += [f"{key}: no" for key in ("same samples", "same states", "checkpoint keys") if not row[key]]
        if row["unpatched loads it"] != "yes":
            wrong.append(f"unpatched code: {row['unpatched loads it']}")
        near = ("networks", "target networks", "ema", "moments", "loss")
        far = [f"{key} {row[key]:.1e}" for key in near if (row[key] or 0) > TOLERANCE]
        limit, why = WHY.get(row["algorithm"], (TOLERANCE, ""))
        too_far = max(row[key] or 0 for key in near) > limit
        if wrong or too_far:
            out.append(f"{UNEXPLAINED}{where}: {', '.join(wrong + far)}")
        elif far:
            out.append(f"{where}: {', '.join(far)}; {why}")
    return out


COLUMNS = {
    "algorithm": "algorithm",
    "ranks": "ranks",
    "steps": "steps",
    "moved": "moved by training",
    "networks": "networks",
    "target networks": "target networks",
    "ema": "EMA",
    "moments": "optimizer",
    "loss": "all that is logged",
    "between ranks": "between ranks",
    "same samples": "same samples",
    "same states": "same random streams",
    "checkpoint keys": "same keys",
    "unpatched loads it": "unpatched code loads it",
}


def worst(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each algorithm: the worst of its rows on different numbers of ranks."""
    of: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of.setdefault(row["algorithm"], []).append(row)

    def of_all(values: list[Any]) -> Any:
        if isinstance(values[0], bool):
            return all(values)
        return next((value for value in values if value != "yes"), "yes") if "yes" in values else max(values)

    merged = []
    for own in of.values():
        one = {key: None if value is None else of_all([row[key] for row in own]) for key, value in own[0].items()}
        merged.append({**one, "ranks": ", ".join(str(row["ranks"]) for row in own)})
    return merged


def section(release: str, command: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the section of evidence/equivalence.md about a release."""
    trained = [row for row in rows if "failed" not in row]
    odd = deviations(rows)
    listed = "\n".join(f"- {line}" for line in odd) if odd else "None."
    return f"""## robomimic {release}

`{command}`, with torch {torch.__version__.split("+")[0]} and Python {sys.version.split()[0]}, gloo on CPU.

{pages.table_of(worst(trained), COLUMNS)}

### Deviations

{listed}
"""


def write(path: Path, release: str, text: str) -> None:
    """Write a release's section into the page; what stands above, and other sections, do not change."""
    head = "## robomimic "
    above, *old = path.read_text().split(head) if path.exists() else ("",)
    parts = {part.split("\n")[0]: part.rstrip() for part in old}
    parts[release] = text.removeprefix(head).rstrip()
    path.parent.mkdir(exist_ok=True)
    path.write_text(above.rstrip() + "\n" + "".join(f"\n{head}{parts[name]}\n" for name in sorted(parts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default="0.3.0")
    parser.add_argument("--algo", default="all", help="names from evidence/variants.py, or all")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--way", default="patched", choices=["patched", "unedited"], help="of tests.trainer")
    parser.add_argument("--precision", default="float32", choices=["float32", "float64"])
    parser.add_argument("--steps", type=int, default=10, help="gradient steps an epoch; 0: a whole pass")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--write", type=Path, help="a page in which the section of this release is replaced")
    args = parser.parse_args()
    shipped = [name for name in VARIANTS if is_shipped(name, args.release)]
    variants = shipped if args.algo == "all" else args.algo.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = compare(
            args.release,
            variants,
            [int(n) for n in args.ranks.split(",")],
            folder.resolve(),
            args.precision,
            args.steps or None,
            args.epochs,
            way=args.way,
        )
    where = "DDPSHIM_UPSTREAM=… " if os.environ.get("DDPSHIM_UPSTREAM") else ""
    text = section(args.release, f"{where}python -m evidence.equivalence {' '.join(sys.argv[1:])}", rows)
    print(text)
    if args.write:
        write(args.write, args.release, text)
    sys.exit(any(line.startswith(UNEXPLAINED) for line in deviations(rows)))


if __name__ == "__main__":
    main()
