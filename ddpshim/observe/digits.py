"""Compares the logged numbers of any two runs: in how many digits do they agree? Imports no torch."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ddpshim.errors import ReportError
from ddpshim.observe import records, runs
from ddpshim.observe.page import Table
from ddpshim.observe.runs import Curves

# Words in the names of numbers that differ between two runs of the same experiment; and of results of episodes, which
# rounding can turn from a failure into a success.
_SPEED = "time|seconds|sec|duration|elapsed|eta|speed|fps|sps|throughput|memory|mem|gpu|cpu|wall|timestamp"
_EPISODES = "success|return|returns|reward|rewards|episode|rollout"
_STEPS = ("step", "steps", "global_step", "iteration", "iter", "timesteps", "total_timesteps", "epoch")
_START = 1e-4  # relative difference that rounding does not exceed at the first number
_GROWTH = 1e3  # by which it does not grow from one number to the next


class Agreement(NamedTuple):
    """A quantity of two runs: digits that agree, by step; `since`: the first step that rounding does not explain."""

    name: str
    digits: dict[float, float]
    since: Optional[float]


def compare(a: Path, b: Path) -> tuple[list[Agreement], str]:
    """Return the quantities that both runs logged, and a verdict. Local. Raises ReportError if they share none.

    Of several kinds of logs the first counts that both have: records of ddpshim or robomimic's log, then TensorBoard.
    """
    all_a, all_b = Curves(), Curves()
    for kind in _KINDS:
        of_a, of_b = _read(a, kind), _read(b, kind)
        found = _compared(of_a, of_b)
        if found:
            return found, _verdict(found)
        all_a, all_b = {**of_a, **all_a}, {**of_b, **all_b}
    found = _compared(all_a, all_b)  # of different kinds
    if not found:
        has = "; ".join(f"{place} has {_described(curves)}" for place, curves in ((a, all_a), (b, all_b)))
        raise ReportError(f"nothing in common: {has}. Log the same quantities at the same steps.")
    return found, _verdict(found)


def table(found: list[Agreement]) -> Table:
    """Return a row for each quantity: digits that agree at the first, the middle and the last common step. Local."""
    rows = []
    for name, digits, since in found:
        steps = sorted(digits)
        shown = [f"{_shown(digits[at])} at {at:g}" for at in (steps[0], steps[len(steps) // 2], steps[-1])]
        rows.append([name, str(len(steps)), *shown, "" if since is None else f"{since:g}"])
    return Table("Digits that agree", ["quantity", "points", "first", "middle", "last", "differs from"], rows)


def _verdict(found: list[Agreement]) -> str:
    compared = [each for each in found if not _has(_SPEED, each.name)] or found
    judged = [each for each in compared if not _has(_EPISODES, each.name)] or compared
    apart = [each for each in judged if each.since is not None]
    if apart:
        first = min(apart, key=lambda each: each.since or 0.0)
        return f"another experiment from {first.since:g} of {first.name} on"
    fewest = min(value for each in judged for value in each.digits.values())
    others = [each.name for each in compared if each.since is not None]
    more = f"; results of episodes differ: {', '.join(others)}" if others else ""
    return f"the same experiment up to rounding ({_shown(fewest)} digits){more}"


def _compared(one: Curves, two: Curves) -> list[Agreement]:
    found = [_agreement(name, one[name], two[other]) for name, other in _matched(one, two)]
    return [each for each in found if each.digits]


def _agreement(name: str, one: Mapping[float, float], two: Mapping[float, float]) -> Agreement:
    """Compare two curves at their common steps.

    Training amplifies rounding, but not at once: a difference is another experiment's if it is large at the first step,
    or much larger than all before it. A difference in the last decimal that was printed is none.
    """
    steps, digits, since, grown = sorted(set(one) & set(two)), dict[float, float](), None, _START / _GROWTH
    printed = 10.0 ** -max((_decimals(value) for curve in (one, two) for value in curve.values()), default=0)
    for i, at in enumerate(steps):
        a, b = one[at], two[at]
        # The neighbours count too, as losses may cross zero.
        near = [abs(curve[step]) for step in steps[max(0, i - 1) : i + 2] for curve in (one, two)]
        scale = max((value for value in near if math.isfinite(value)), default=0.0)
        is_finite = math.isfinite(a) and math.isfinite(b)
        apart = abs(a - b) / (scale or 1.0) if is_finite else float(a != b and not (math.isnan(a) and math.isnan(b)))
        digits[at] = max(0, math.floor(-math.log10(apart))) if apart else math.inf
        if apart and not (abs(a - b) < 1.01 * printed <= 1.01e-3 * min(1.0, scale)):
            since = at if since is None and apart > max(_START, _GROWTH * grown) else since
            grown = max(grown, apart)
    return Agreement(name, digits, since)


def _decimals(value: float) -> int:
    text = repr(value)
    return 99 if "e" in text or not math.isfinite(value) else len(text.partition(".")[2].rstrip("0"))


def _matched(one: Curves, two: Curves) -> Iterator[tuple[str, str]]:
    """Yield pairs of equal names; then of names whose last part, in lower case, only one on each side has."""
    yield from ((name, name) for name in one if name in two)
    rest = [[name for name in here if name not in there] for here, there in ((one, two), (two, one))]
    ends = [[name.lower().rpartition("/")[2] for name in names] for names in rest]
    for name, end in zip(rest[0], ends[0]):
        if ends[0].count(end) == ends[1].count(end) == 1:
            yield name, rest[1][ends[1].index(end)]


def _shown(digits: float) -> str:
    return "all" if math.isinf(digits) else f"{digits:.0f}"


def _has(words: str, name: str) -> bool:
    words_of_name = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower().replace("_", " ")
    return re.search(rf"\b({words})\b", words_of_name) is not None


def _described(curves: Curves) -> str:
    names = [f"{name} at {min(at):g} to {max(at):g}" for name, at in curves.items()]
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5) if names else "no numbers"


def _read(place: Path, kind: str) -> Curves:
    if not place.exists():
        raise ReportError(f"{place} does not exist; there is nothing to compare. Name a folder or a file of logs.")
    if kind == "log":
        run = None if place.is_file() else runs.find(place) or runs.logged(place)
        return {} if run is None else run.curves()
    pattern, reader = _KINDS[kind]
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    files = [path for path in files if re.fullmatch(pattern, path.name) and path.parent.name != records.FOLDER]
    above = [path.parent.relative_to(place).parts if place.is_dir() else () for path in files]
    # Folders that hold all files are perhaps a time stamp.
    num_shared = next(
        (i for i, names in enumerate(zip(*above)) if len(set(names)) > 1), min(map(len, above), default=0)
    )
    curves: Curves = {}
    for path, folders in zip(files, above):
        for name, at, value in reader(path):
            curves.setdefault("/".join([*folders[num_shared:], name]), {})[at] = value
    return curves


def _events(path: Path) -> Iterator[tuple[str, float, float]]:
    """Yield the scalars of a TensorBoard file: a length of 8 bytes, its checksum, an event, its checksum, and so on."""
    event_class = None
    for name in ("tensorboard.compat.proto.event_pb2", "tensorboardX.proto.event_pb2"):
        with contextlib.suppress(ImportError):
            event_class = event_class or importlib.import_module(name).Event
    if event_class is None:
        raise ReportError(f"{path} cannot be read without tensorboard or tensorboardX. Run `pip install tensorboard`.")
    data, at = path.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = event_class()
        try:
            event.ParseFromString(data[at + 12 : at + 12 + length])
        except Exception:  # protobuf's own class: the end of a file that is still written, or torn
            return
        at += length + 16
        for value in event.summary.value:
            numbers = [value.simple_value] if value.HasField("simple_value") else [*value.tensor.float_val]
            if len(value.tensor.tensor_content) == 4:
                numbers = list(struct.unpack("<f", value.tensor.tensor_content))
            if len(numbers) == 1:
                yield value.tag, float(event.step), numbers[0]


def _json_lines(path: Path) -> Iterator[tuple[str, float, float]]:
    for number, line in enumerate(path.read_text(errors="replace").splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line) if line.startswith("{") else {}
            yield from _of_row(dict(_flat("", row)), number)


def _csv(path: Path) -> Iterator[tuple[str, float, float]]:
    with path.open(newline="", errors="replace") as file:
        for number, row in enumerate(csv.DictReader(file)):
            numbers = {}
            for name, text in row.items():
                with contextlib.suppress(ValueError, TypeError):
                    numbers[str(name)] = float(text)
            yield from _of_row(numbers, number)


def _of_row(row: Mapping[str, float], number: int) -> Iterator[tuple[str, float, float]]:
    """Yield the numbers of a row at its step: the first of its columns that is called so, else the row's number."""
    lower = {name.lower(): value for name, value in row.items()}
    at = next((lower[name] for name in _STEPS if name in lower), float(number))
    yield from ((name, at, value) for name, value in row.items() if name.lower() not in _STEPS)


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _flat(f"{name}/{key}" if name else str(key), below)
    elif type(value) in (int, float):
        yield name, float(value)


_KINDS: dict[str, Any] = {
    "log": None,
    "TensorBoard": (r"events\.out\.tfevents\..*", _events),
    "JSON lines": (r".*\.(jsonl|ndjson|json\.txt)|log\.txt", _json_lines),
    "CSV": (r".*\.csv", _csv),
}
