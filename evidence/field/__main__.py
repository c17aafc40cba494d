"""Runs public trainers, completely unedited, in one process and on ranks, and compares their results.

Run it: python -m evidence.field --upstream DIR [--nproc 2,3] [--only NAMES] [--work DIR] [--write evidence/trainers.md]
With --check instead: what `python -m ddpshim check` says of each; a false alarm or no answer gives exit code 1.

DIR contains a folder OWNER+NAME with each trainer's sources at its commit (see patches/README.md);
requirements/trainers.txt lists the packages they need.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import torch

from evidence import pages
from evidence.compare import is_rounding, nested_difference, numbers_differ
from evidence.field.left import Left, rows, saved, without_clock
from evidence.field.trainers import TRAINERS, Trainer

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DEADLINE_S = 900
TOLERANCE = 1e-5  # float32, after 10 to 30 steps
# Two runs in one process that round otherwise, on other CPU instructions or from weights whose last bit differs. Their
# difference from the first run measures the rounding error.
ROUNDED = {
    "instructions": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "DNNL_MAX_CPU_ISA": "SSE41"},
    "nudged": {"FIELD_NUDGED": "1"},
}
IGNORED = {"__pycache__", "ddpshim-logs"}


@dataclass
class Row:
    """A line of the table."""

    trainer: Trainer
    num_ranks: int
    verdict: str  # equal, differs, refused, failed
    differences: dict[str, Optional[float]]
    notes: list[str]
    on_rows: Optional[str] = None  # per cent of the operations on batches that were divided
    rounding: dict[str, Optional[float]] = field(default_factory=dict)  # as `differences`, between runs of one process
    seconds: tuple[float, float] = (0.0, 0.0)  # of one process, and of the ranks


def environment(trainer: Trainer, upstream: Path, sources: Path, probe: Optional[Path]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    folders = [sources / part if (sources / part).is_dir() else upstream / part for part in trainer.path]
    shown = {
        "PYTHONPATH": os.pathsep.join(
            map(str, [*reversed(folders), HERE / "stubs", ROOT / "tests/stubs/IPython", ROOT])
        ),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HYDRA_FULL_ERROR": "1",
        "WANDB_MODE": "disabled",
        "DDPSHIM_ROWS": "all",  # these networks are so small that `auto` would compute most calls whole
        **{key: value.format(sources=sources) for key, value in trainer.environment.items()},
    }
    return {**kept, **shown, **({"FIELD_PROBE": str(probe)} if probe else {})}


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not IGNORED & set(path.parts)
    }


def play(trainer: Trainer, upstream: Path, place: Path, num_ranks: int, action: str = "run", **variables: str) -> Left:
    """Run (or check) the trainer in a fresh copy of its sources and data, and collect its results."""
    root, probe = place / "run", place / "probe"
    sources = root / "sources"
    shutil.copytree(upstream / trainer.upstream, sources, ignore=shutil.ignore_patterns("*.ipynb", ".git"))
    probe.mkdir()
    pristine = digests(root)
    trainer.make_data(sources)
    before = digests(root)
    launcher = ["-m", "ddpshim", action, "--nproc", str(num_ranks), "--log-dir", str(place / "logs")]
    command = [sys.executable, *(launcher if num_ranks else []), *trainer.typed.split()]
    started = time.perf_counter()
    with open(place / "printed.txt", "wb") as out:
        process = subprocess.Popen(
            command,
            cwd=sources / trainer.folder,
            env={**environment(trainer, upstream, sources, probe), **variables},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            exit_code = -9
    after = digests(root)
    new = [name for name in after if name not in before]
    left = Left(
        exit_code,
        {int(path.stem[5:]): torch.load(path, weights_only=False) for path in sorted(probe.glob("rank_*.pt"))},
        {},
        {},
        (place / "printed.txt").read_text(errors="replace"),
        [name for name, digest in pristine.items() if after.get(name) != digest],
        time.perf_counter() - started,
    )
    for name in new:
        shown = without_clock(name)
        while shown in left.files:
            shown += " (again)"
        left.files[shown] = root / name
    if not new:  # `check` removes what the trainer makes
        return left
    states = place / "states.pt"
    subprocess.run(
        [sys.executable, str(HERE / "states.py"), str(root), str(states)],
        env=environment(trainer, upstream, sources, None),
        cwd=sources / trainer.folder,
        check=True,
    )
    left.checkpoints = {name: value for name, value in torch.load(states).items() if name in new}
    states.unlink()
    for name in left.checkpoints:  # their tensors are in memory; all trainers' would fill a disk
        os.truncate(root / name, 1)
    return left


def refusal(printed: str) -> str:
    """Return ddpshim's message if it refused the trainer, else an empty string."""
    found = re.findall(r"ddpshim[\w.]*\.\w+Error: (.+)", printed)
    return found[-1] if found else ""


def _last_error(printed: str) -> str:
    found = re.findall(r"^(?:.*failed first: |.*same error: )?([\w.]*(?:Error|Exception)\b.*)", printed, re.MULTILINE)
    return found[-1] if found else ""


def _differences(one: Left, other: Left, pattern: str) -> tuple[dict[str, Optional[float]], list[str]]:
    """Return the largest difference of each kind, and notes on files that could not be read."""
    found: dict[str, Optional[float]] = {}
    for key in ("weights", "optimizer"):
        mine = [optimizer[key] for optimizer in one.probes[0]]
        theirs = ([optimizer[key] for optimizer in ranks] for ranks in other.probes.values())
        found[key] = max((nested_difference(mine, each) for each in theirs), default=math.inf)
    found["EMA"], _ = saved(one, other, ema=True)
    found["checkpoints"], unread = saved(one, other, ema=False)
    found["losses"] = numbers_differ(rows(one, pattern), rows(other, pattern))
    return found, unread


def compared(trainer: Trainer, one: Left, samples: list[Left], two: Left, num_ranks: int) -> Row:
    """Return the row of `trainer`; `samples` are runs of one process with different rounding."""
    notes = []
    exit_code = next((left.exit_code for left in (one, *samples) if left.exit_code), 0)
    if exit_code:
        return Row(trainer, num_ranks, "failed", {}, [f"one process ended with {exit_code}"])
    each = [_differences(one, sample, trainer.losses)[0] for sample in samples]
    rounding = {key: max(own[key] or 0.0 for own in each) for key in each[0]}
    if two.edited:
        notes.append(f"edited: {two.edited}")
    if two.exit_code:
        verdict = "refused" if refusal(two.printed) else "failed"
        return Row(trainer, num_ranks, verdict, {}, [*notes, refusal(two.printed) or _last_error(two.printed)])
    differences, unread = _differences(one, two, trainer.losses)
    notes += unread
    if set(two.probes) != set(range(num_ranks)):
        notes.append(f"ranks with an optimizer at the end: {sorted(two.probes)}")
    num_rows = len(rows(one, trainer.losses)), len(rows(two, trainer.losses))
    if num_rows[0] != num_rows[1] or not num_rows[0]:
        notes.append(f"rows of the log: {num_rows[0]} and {num_rows[1]}")
    for name in sorted(one.files.keys() - two.files.keys()):
        notes.append(f"missing: {name}")
    for name in sorted(two.files.keys() - one.files.keys()):
        notes.append(f"in excess: {name}")
    for name in sorted(one.files.keys() & two.files.keys()):
        sizes = one.files[name].stat().st_size, two.files[name].stat().st_size
        if bool(sizes[0]) != bool(sizes[1]):
            notes.append(f"{name}: {sizes[0]} and {sizes[1]} bytes")
    shares = re.findall(r"ddpshim: (\d+)% of tensor operations", two.printed)
    is_equal = all((by or 0.0) <= TOLERANCE or is_rounding(by or 0.0, rounding[key]) for key, by in differences.items())
    verdict, seconds = "equal" if is_equal and not notes else "differs", (one.seconds, two.seconds)
    return Row(trainer, num_ranks, verdict, differences, notes, shares[-1] if shares else None, rounding, seconds)


def _left(trainer: Trainer, name: str, upstream: Path, work: Path, num_ranks: int = 0) -> Left:
    """Return the results of a trainer's run `name`: on ranks, or, if there are none, in one process."""
    place = work / trainer.name / name
    place.mkdir(parents=True)
    left = play(trainer, upstream.resolve(), place, num_ranks, **ROUNDED.get(name, {}))
    print(f"{trainer.name} {name}: exit {left.exit_code}, {left.seconds:.0f} s", flush=True)
    return left


def _answer(trainer: Trainer, upstream: Path, work: Path, num_ranks: int) -> str:
    """Return what `check` answers, and print it; all that it printed if that is not "yes"."""
    left = play(trainer, upstream.resolve(), work / trainer.name / f"check_{num_ranks}", num_ranks, "check")
    found = re.findall(r"^the same experiment: (.+)", left.printed, re.MULTILINE)
    answer = found[0] if found else f"none, exit code {left.exit_code}"
    print(f"{trainer.name} | {answer} | {left.seconds:.0f}", flush=True)
    if answer != "yes":
        print(left.printed, flush=True)
    return answer


def _rows(trainer: Trainer, upstream: Path, work: Path, ranks: list[int]) -> Iterator[Row]:
    """Yield the row of each number of ranks. A run on ranks is removed once it is compared: its files are large."""
    left: dict[str, Left] = {}
    for name in ("one", *ROUNDED):
        left[name] = _left(trainer, name, upstream, work)
        if left[name].exit_code:
            print(left[name].printed[-3000:])
            break
    samples = [left[name] for name in ROUNDED if name in left]
    for num_ranks in ranks:
        of_ranks = left["one"]
        if not any(one.exit_code for one in left.values()):
            of_ranks = _left(trainer, f"ranks_{num_ranks}", upstream, work, num_ranks)
        yield compared(trainer, left["one"], samples, of_ranks, num_ranks)
        shutil.rmtree(work / trainer.name / f"ranks_{num_ranks}", ignore_errors=True)


COLUMNS = ("trainer", "ranks", "on rows", "result", "weights", "EMA", "optimizer", "logged numbers", "seconds")
START = "<!-- what follows is written by python -m evidence.field --write evidence/trainers.md -->"
END = "<!-- end -->\n"


def lines_of(table: list[Row]) -> list[str]:
    """Return a line for each trainer, the worst of its numbers of ranks; then the notes, and the sources."""
    of_trainer: dict[str, list[Row]] = {}
    for row in table:
        of_trainer.setdefault(row.trainer.name, []).append(row)
    lines = [*pages.table(COLUMNS, map(_cells, of_trainer.values()), prints=False), ""]
    lines += [f"- {row.trainer.name}, {row.num_ranks} ranks: {note}" for row in table for note in row.notes if note]
    sources: dict[tuple[str, str], list[Trainer]] = {}
    for trainer in (each[0].trainer for each in of_trainer.values()):
        sources.setdefault(trainer.source, []).append(trainer)
    of_source = []
    for (owner, commit), own in sources.items():
        stubs = dict.fromkeys(stub for trainer in own for stub in trainer.stubs)
        of_source.append((owner, commit[:12], ", ".join(trainer.name for trainer in own), ", ".join(stubs)))
    return [*lines, "", *pages.table(("source", "commit", "trainers", "stand-ins"), of_source, prints=False)]


def _cells(of: list[Row]) -> tuple[str, ...]:
    results = [row.verdict if row.verdict == "equal" else f"**{row.verdict}** on {row.num_ranks}" for row in of]
    shown = []
    for key in ("weights", "EMA", "optimizer", "losses"):
        values = [value for row in of if (value := row.differences.get(key)) is not None]
        rounding = of[0].rounding.get(key) or 0.0
        shown.append(f"{pages.cell(max(values))} ({pages.cell(rounding)})" if values else "")
    ranks, seconds = ", ".join(str(row.num_ranks) for row in of), max(row.seconds[1] for row in of)
    least = min((int(row.on_rows) for row in of if row.on_rows), default=None)
    on_rows = "" if least is None else f"{least}%"
    return of[0].trainer.name, ranks, on_rows, ", ".join(dict.fromkeys(results)), *shown, f"{seconds:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence.field", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--upstream", type=Path, default=os.environ.get("DDPSHIM_UPSTREAM"))
    parser.add_argument("--nproc", default="2", help="numbers of ranks, with commas between them")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--work", type=Path, help="a new folder, to keep runs of one process")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--check", action="store_true", help="print trainer | answer of `ddpshim check` | seconds")
    args = parser.parse_args()
    if not args.upstream:
        parser.error("--upstream, or DDPSHIM_UPSTREAM, names the folder of the sources")
    only = [name for name in args.only.split(",") if name]
    table, answers, ranks = [], [], [*map(int, args.nproc.split(","))]
    work = (args.work or Path(tempfile.mkdtemp(prefix="field-"))).resolve()
    for trainer in TRAINERS:
        if only and trainer.name not in only:
            continue
        lacking = [name for name in trainer.needs if importlib.util.find_spec(name) is None]
        if lacking or not (args.upstream / trainer.upstream).is_dir():
            print(f"{trainer.name}: skipped, lacking {lacking or trainer.upstream}", flush=True)
            continue
        if args.check:
            answers += [_answer(trainer, args.upstream, work, num_ranks) for num_ranks in ranks]
            continue
        for row in _rows(trainer, args.upstream, work, ranks):
            table.append(row)
            shown = f"{row.verdict} {row.differences} {row.notes}; rounding {row.rounding}"
            print(
                f"{trainer.name} on {row.num_ranks} ranks: {shown}; seconds {row.seconds}; {row.on_rows}% on rows",
                flush=True,
            )
    if args.write:
        pages.fill(args.write, START, "\n".join(lines_of(table)) + "\n", END)
    return int(not {*answers, *(row.verdict for row in table)} <= {"yes", "equal", "refused"})


if __name__ == "__main__":
    sys.exit(main())
