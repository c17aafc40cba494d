"""Compares the logged numbers of any two runs: in how many digits do they agree? Imports no torch."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ddpshim.errors import ReportError
from ddpshim.observe import records
from ddpshim.observe.report import Curve, Rows, find

Curves = dict[str, Curve]  # by name

# Words in the names of numbers that differ between two runs of the same experiment; and of results of episodes, which
# rounding can turn from a failure into a success.
_SPEED = "time|timing|seconds|sec|duration|elapsed|eta|speed|fps|sps|throughput|memory|mem|ram|gpu|cpu|wall|timestamp"
_EPISODES = "success|return|returns|reward|rewards|episode|rollout"
_STEPS = ("step", "steps", "global_step", "iteration", "iter", "timesteps", "total_timesteps", "epoch")
_START = 1e-4  # relative difference that rounding does not exceed at the first number
# By which it does not grow from one number to the next. With epochs of 100 steps robomimic's example grows 320- to
# 440-fold where one process is nudged by the last bit of some weights, and 2,100-fold on 2 ranks (4.3e-07 to 9.0e-04).
_GROWTH = 1e4


class SharedDigits(NamedTuple):
    """A quantity of two runs: digits that agree, by step; `since`: the first step that rounding does not explain."""

    name: str
    digits: Curve
    since: Optional[float]


def compare(a: Path, b: Path) -> tuple[list[SharedDigits], str]:
    """Return the quantities that both runs logged, and a verdict. Local. Raises ReportError if they share none.

    Of several kinds of logs the first counts that both have: records of ddpshim, then TensorBoard.
    """
    has: list[set[str]] = [set(), set()]
    for kind in _KINDS:
        one, two = _read(a, kind), _read(b, kind)
        found = [agreement(name, one[name], two[name]) for name in one if one[name].keys() & two.get(name, {}).keys()]
        if found:
            return found, _verdict(found)
        has = [names | {*curves} for names, curves in zip(has, (one, two))]
    shown = (f"{place} has {', '.join(sorted(names)[:5]) or 'no numbers'}" for place, names in zip((a, b), has))
    raise ReportError(f"nothing in common: {'; '.join(shown)}. Log the same quantities at the same steps.")


def table(found: list[SharedDigits]) -> Rows:
    """Return a row for each quantity: digits that agree at the first, the middle and the last common step. Local."""
    rows = [["quantity", "points", "first", "middle", "last", "differs from"]]
    for name, digits, since in found:
        steps = sorted(digits)
        cells = [f"{_shown(digits[at])} at {at:g}" for at in (steps[0], steps[len(steps) // 2], steps[-1])]
        rows.append([name, str(len(steps)), *cells, "" if since is None else f"{since:g}"])
    return rows


def _verdict(found: list[SharedDigits]) -> str:
    judged = [each for each in found if not _has(_SPEED, each.name)] or found
    judged = [each for each in judged if not _has(_EPISODES, each.name)] or judged
    since, name = min(((each.since, each.name) for each in judged if each.since is not None), default=(None, ""))
    if since is not None:
        return f"another experiment from {since:g} of {name} on"
    fewest = min(value for each in judged for value in each.digits.values())
    return f"the same experiment up to rounding ({_shown(fewest)} digits)"


def agreement(name: str, one: Curve, two: Curve) -> SharedDigits:
    """Compare two curves at their common steps. Local.

    Training amplifies rounding, but not at once: a difference is another experiment's if it is large at the first step,
    or much larger than all before it. A difference in the last decimal that was printed is none.
    """
    steps, digits, since, grown = sorted(one.keys() & two.keys()), Curve(), None, _START / _GROWTH
    printed = 10.0 ** -max(_decimals(value) for curve in (one, two) for value in curve.values())
    for i, at in enumerate(steps):
        a, b = one[at], two[at]
        # The neighbours count too, as losses may cross zero.
        near = [abs(curve[step]) for step in steps[max(0, i - 1) : i + 2] for curve in (one, two)]
        scale = max(filter(math.isfinite, near), default=0.0)
        apart = abs(a - b) / (scale or 1.0) if math.isfinite(a - b) else float(repr(a) != repr(b))
        digits[at] = max(0, math.floor(-math.log10(apart))) if apart else math.inf
        if apart and not (abs(a - b) < 1.01 * printed <= 1.01e-3 * min(1.0, scale)):
            since = at if since is None and apart > max(_START, _GROWTH * grown) else since
            grown = max(grown, apart)
    return SharedDigits(name, digits, since)


def _decimals(value: float) -> int:
    text = repr(value)
    return 99 if "e" in text or not math.isfinite(value) else len(text.partition(".")[2].rstrip("0"))


def _shown(digits: float) -> str:
    return "all" if math.isinf(digits) else f"{digits:.0f}"


def _has(words: str, name: str) -> bool:
    words_of_name = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower().replace("_", " ")
    return re.search(rf"\b({words})\b", words_of_name) is not None


def _read(place: Path, kind: str) -> Curves:
    if kind == "log":
        place.stat()  # raises OSError if it does not exist
        return find(place).curves
    pattern, reader = _KINDS[kind]
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    files = [path for path in files if re.fullmatch(pattern, path.name) and path.parent.name != records.FOLDER]
    home = os.path.commonpath([path.parent for path in files]) if files else ""  # perhaps a time stamp
    curves: Curves = {}
    for path in files:
        for name, at, value in reader(path):
            curves.setdefault("/".join([*path.parent.relative_to(home).parts, name]), {})[at] = value
    return curves


def _events(path: Path) -> Iterator[tuple[str, float, float]]:
    """Yield the scalars of a TensorBoard file: a length of 8 bytes, its checksum, an event, its checksum, and so on."""
    module: Any = None
    for name in ("tensorboard.compat.proto.event_pb2", "tensorboardX.proto.event_pb2"):
        with contextlib.suppress(ImportError):
            module = module or importlib.import_module(name)
    if module is None:
        raise ReportError(f"{path} cannot be read without tensorboard or tensorboardX. Run `pip install tensorboard`.")
    data, at = path.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = module.Event()
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


def _table(path: Path) -> Iterator[tuple[str, float, float]]:
    """Yield the numbers of each row at its step: the first of its columns that is called so, else the row's number."""
    for number, row in enumerate(_rows(path)):
        numbers = {}
        for name, value in row.items():
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                numbers.update({} if isinstance(value, bool) else {str(name): float(value)})
        lower = {name.lower(): value for name, value in numbers.items()}
        at = next((lower[name] for name in _STEPS if name in lower), float(number))
        yield from ((name, at, value) for name, value in numbers.items() if name.lower() not in _STEPS)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a CSV file, or the objects of one of JSON lines."""
    with path.open(newline="", errors="replace") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
            return
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                yield dict(_flat("", json.loads(line))) if line.startswith("{") else {}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _flat(f"{name}/{key}" if name else str(key), below)
    else:
        yield name, value


_KINDS: dict[str, Any] = {
    "log": None,
    "TensorBoard": (r"events\.out\.tfevents\..*", _events),
    "table": (r".*\.(csv|jsonl|ndjson|json\.txt)|log\.txt", _table),
}
