"""Writes tests/outputs.txt, the output of each sub-command for --help and for a user's mistakes; and docs/options.md's
table.

python -m tests.outputs [--write]

tests/tools/test_command_line.py compares the first with the current output, on the Python version that wrote it:
argparse's words and line breaks differ in others. tests/tools/test_options.py compares the second. Without --write the
first goes to the screen.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from unittest import mock

import ddpshim.__main__ as command_line
from ddpshim.robomimic.options import RobomimicOptions
from tests.tools.test_command_line import COMMANDS, MISSING, PARSERS, SAMPLES, fill

FILE = Path(__file__).with_name("outputs.txt")
OPTIONS = Path(__file__).parents[1] / "docs" / "options.md"
PYTHON = (3, 11)  # the version that wrote FILE
# A wrong value for an option of each type.
WRONG = {
    ("run",): ["--nproc", "none", "train.py"],
    ("check",): ["--steps", "0", "train.py"],
    ("selftest",): ["--timeout", "long"],
    ("slurm",): ["--time", "soon", "train.py"],
    ("report",): ["run", "--export", "mlflow"],
    ("docs",): ["lanch"],
}


def calls() -> Iterator[list[str]]:
    """Yield the command lines of the table."""
    for command in PARSERS:
        yield [*command, "--help"]
    for command in COMMANDS:
        yield [*command, "--no-such-flag", *SAMPLES[command]]
    for (command, _), (argv, _) in MISSING.items():
        yield [*command, *argv]
    for command, argv in WRONG.items():
        yield [*command, *argv]
    yield ["rnu"]


def _said(argv: list[str]) -> str:
    """Return the output of one call with its exit code, without text that depends on this machine."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = command_line.main(argv)
        except SystemExit as error:
            code = int(error.code or 0)
    text = out.getvalue().replace(os.getcwd(), "HERE").replace(sys.executable, "PYTHON")
    text = re.sub(r"\.\d+\.partial", ".PID.partial", text)
    text = re.sub(r"job-name=\S+|ddpshim [\d.]+\S*", lambda found: found[0].split("=")[0].split(" ")[0], text)
    return f"$ ddpshim {' '.join(argv)}\n{text.rstrip()}\n[exit code {code}]\n"


def table() -> str:
    """Return the whole table, made in a temporary folder with the tests' files, to which it changes meanwhile."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        stack.callback(os.chdir, before)
        stack.enter_context(mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}))
        stack.enter_context(mock.patch.dict(sys.modules, {"robomimic": None}))
        stack.enter_context(mock.patch.object(sys, "argv", ["ddpshim"]))
        folder = Path(name).resolve()
        fill(folder)
        os.chdir(folder)
        return "\n".join(map(_said, calls()))


def options_page() -> str:
    """Return docs/options.md with the table of the present options. A value is shown as a config would have it."""
    rows = ["| option | variable | default | allowed | effect |", "|---|---|---|---|---|"]
    for f in fields(RobomimicOptions):
        default = "none" if f.default is None else json.dumps(f.default).strip('"')
        allowed, effect = f.metadata["kind"].allowed, f.metadata["effect"]
        rows.append(f"| `{f.name}` | `DDPSHIM_{f.name.upper()}` | {default} | {allowed} | {effect} |")
    before, _, rest = OPTIONS.read_text().partition("| option |")
    return before + "\n".join(rows) + "\n" + rest[rest.index("\n\n") + 1 :]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        FILE.write_text(table())
        OPTIONS.write_text(options_page())
    else:
        print(table())
