"""Broken and hostile input of every sub-command: one sentence and the documented exit code, no traceback, no waiting.

The commands and their options are those of tests/tools/test_command_line.py, which a new command has to be in.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import shutil
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import ddpshim.__main__ as command_line
from ddpshim import Options
from ddpshim.errors import OptionsError
from ddpshim.trainers import patching
from tests.preloaded_commands import patience
from tests.tools.test_command_line import COMMANDS, MISSING, PARSERS, SAMPLES, Command, _call, fill

pytestmark = pytest.mark.unit
_WAITS_S = 20  # longer than any call; a pipe would be waited for until then


def _foreign_checkpoint() -> bytes:
    out = io.BytesIO()
    torch.save({"model": {"w": torch.zeros(2)}, "epoch": "three"}, out)
    return out.getvalue()


# What lies where a file is expected: no file at all, and files of any content.
NO_FILES: dict[str, Callable[[Path], Any]] = {
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "pipe": lambda path: os.mkfifo(path),
    "device without end": lambda path: path.symlink_to("/dev/zero"),
}
CONTENTS: dict[str, bytes] = {
    "NUL": b"\0" * 100,
    "all bytes": bytes(range(256)) * 3,
    "deep lists": b"[" * 20_000,
    "deep mappings": b'{"a":' * 20_000,
    "deep call": b"f(" * 3000 + b")" * 3000,
    "checkpoint": _foreign_checkpoint(),
    "other digits": '{"kind": "start", "time": ٣, "start": ²}'.encode(),
}
# Python that compiles: where a command would start it, it is left out.
PROGRAMS: dict[str, bytes] = {
    "empty": b"",
    "long number": b"9" * 4000,
    "half a character": b'{"kind": "start", "time": 1, "start": 1, "gpu": "\\ud800"}\n',
    "list": b"[1, [2]]",
    "branches": b"if a:\n    pass\n" + b"elif a:\n    pass\n" * 700,
    "sum": b"import torch\nmodel = " + b"1 + " * 5000 + b"1\n",
}
EVERYTHING = [*NO_FILES, *CONTENTS, *PROGRAMS]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    def waited(number: int, frame: Any) -> None:
        raise AssertionError("a command waits")

    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    for module, name in ((command_line, "_parser"), (patching, "load_sets")):  # they are the same for all calls
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name)))
    before = signal.signal(signal.SIGALRM, waited)
    signal.setitimer(signal.ITIMER_REAL, patience(_WAITS_S))
    yield tmp_path
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _put(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind in NO_FILES:
        NO_FILES[kind](path)
    else:
        path.write_bytes({**CONTENTS, **PROGRAMS}[kind])


def _said(argv: list[str], capsys: pytest.CaptureFixture[str], codes: tuple[int, ...]) -> str:
    """What a call that gives one of these codes printed: an answer, or a sentence."""
    signal.setitimer(signal.ITIMER_REAL, patience(_WAITS_S))  # begins anew with each call
    code = _call(argv)
    out, err = capsys.readouterr()
    assert code in codes, (argv, code, err)
    assert "Traceback" not in out + err, argv
    assert out or err, argv
    if not out:
        assert err.startswith(("ddpshim: ", "usage: ")), (argv, err)
    return out + err


@pytest.mark.parametrize(
    ("command", "name"),
    [call for call, (argv, _) in MISSING.items() if any(word.startswith("absent") for word in argv)],
    ids=str,
)
def test_no_file_and_any_content_where_a_command_is_given_a_file(
    command: Command, name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, code = MISSING[command, name]
    (place,) = (here / word for word in argv if word.startswith("absent"))
    starts = command in (("run",), ("check",))
    for kind in [*NO_FILES, *CONTENTS, *(() if starts else PROGRAMS)]:
        _put(place, kind)
        of_no_file = (code,) if starts or command == ("slurm",) or kind.startswith("link") else (1, 2)
        _said([*command, *argv], capsys, of_no_file if kind in NO_FILES else (0, 1, 2))


INSIDE: dict[str, list[Command]] = {
    "tree/package/module.py": [("patch", "manifest")],
    "patches/one.patch": [("patch", "manifest")],
    "patches/manifest.json": [("patch", "manifest")],
    "installed/robomimic/__init__.py": [command for command in COMMANDS if command[0] == "patch"],
    "installed/robomimic/utils/train_utils.py": [("patch", "status")],
    "run/ddpshim/rank_0.jsonl": [("report",)],
    "run/ddpshim/rank_1.jsonl": [("report",)],
    "run/ddpshim/rank_٣.jsonl": [("report",)],
}


@pytest.mark.parametrize("place", INSIDE)
def test_no_file_and_any_content_in_a_folder_that_a_command_reads(
    place: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, command in itertools.product(EVERYTHING, INSIDE[place]):
        _put(here / place, kind)
        _said([*command, *SAMPLES[command]], capsys, (0, 1, 2))


JUNK = [None, True, -1, 0.5, 1e300, float("nan"), 10**30, "x", "٣", "\ud800", [], [[[1]]], {}, {"a": {"b": []}}, 10**9]


def test_junk_values_in_records(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each key of each kind of record, with each junk value: a page, or a sentence."""
    whole: list[dict[str, Any]] = [
        {"kind": "start", "start": 1, "world_size": 1, "options": {}, "gpu": "a", "backend": "gloo", "environment": {}},
        {"kind": "epoch", "epoch": 1, "phase": "training", "own": {"Loss": 1.0}, "mean": {"Loss": 1.0}, "steps": 2,
         "memory": {"rss": 1e9}, "seconds": {"compute": 1.0}},
        {"kind": "guard", "check": "weights", "network": "a", "passed": False, "said": "b", "reductions": 1},
        {"kind": "checkpoint", "path": "a", "bytes": 4, "seconds": 0.1, "in_background": True},
        {"kind": "rollout", "epoch": 1, "environment": "a", "episodes": 2, "metrics": {"Return": 1.0}, "seconds": 1.0,
         "interval": [0.0, 1.0], "returns": [1.0, 2.0]},
        {"kind": "end", "how": "failed", "error": "x", "first": 0, "reason": "y", "epoch": 1, "exit_code": 1},
    ]  # fmt: skip
    file = here / "run" / "ddpshim" / "rank_0.jsonl"
    lines = [json.dumps({**record, "time": float(i)}) for i, record in enumerate(whole)]
    file.write_text("\n".join(lines))
    for i, record in enumerate(whole):
        for key, value in itertools.product(("time", *record), JUNK):
            junk = json.dumps({**record, "time": float(i), key: value})
            file.write_text("\n".join([*lines[: i + 1], junk, *lines[i + 1 :]]))
            _said(["report", "run", "--markdown"], capsys, (0, 2))
    file.write_text('{"kind": "start", "start": ' + "[" * 10**5 + "\n" + lines[0])
    assert "1 line of the records could not be read" in _said(["report", "run", "--markdown"], capsys, (0,))


NO_NUMBERS = ["", " ", "²", "٣", "-1", "1.5.1", "nan", "1e999", "0x1", "1_0", "9" * 5000, "a" * 300, "\udcff"]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_options_that_are_no_numbers_no_names_and_no_text(
    command: Command, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, numbers = [], list[str]()
    for action in PARSERS[command]._actions:
        if action.nargs == 0 or not action.option_strings:
            continue
        is_number = (
            callable(action.type) and action.type is not Path and action.dest not in ("select", "ignore", "explain")
        )
        if command == ("selftest",) and not is_number:
            continue  # it would run
        numbers += action.option_strings * is_number
        calls += [[action.option_strings[-1], text] for text in NO_NUMBERS]
    program = ["absent.py"] if (command, "program") in MISSING else SAMPLES[command]
    capsys.readouterr()
    for option, text in calls:
        said = _said([*command, f"{option}={text}", *program], capsys, (0, 1, 2))
        assert text not in ("²", "٣") or option not in numbers or f"{text!r} is" in said


def test_one_process_of_a_proof_that_is_no_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, told in (("'", "argument --one: No closing quotation"), ("-m", "required"), (" ", "required")):
        assert told in _said(["check", f"--one={text}", "train.py"], capsys, (2,))


def test_variables(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_RESTART_COUNT", "DDPSHIM_EXACT", "DDPSHIM_LAUNCHER"):
        for text in ("²", "٣", "-1", "9" * 5000, "x\ud800"):
            monkeypatch.setenv(name, text) if "\ud800" not in text else None
            _said(["slurm", "absent.py"], capsys, (0,))
            _said(["run", "absent.py"], capsys, (2,))
        monkeypatch.delenv(name)


def test_numbers_of_other_scripts() -> None:
    for raw in ("٣", "1_0", "9" * 5000, "²"):
        with pytest.raises(OptionsError):
            Options.read({"DDPSHIM_EXACT": raw})


def test_a_zip_of_something_else_is_no_progress(here: Path) -> None:
    from ddpshim.checkpoint import find_damage

    for kind in (*NO_FILES, *CONTENTS, *PROGRAMS):
        _put(here / "a.pth", kind)
        assert (find_damage(here / "a.pth") is None) == (kind == "checkpoint")
    with zipfile.ZipFile(here / "b.pth", "w") as file:
        file.writestr("readme", "x")
    assert find_damage(here / "b.pth") == "it is not one of torch's files"
