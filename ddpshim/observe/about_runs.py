"""Defines the commands that read a run's records: report and predict."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ddpshim.arguments import positive

if TYPE_CHECKING:
    from ddpshim.arguments import Commands


def add(commands: Commands) -> None:
    """Add both to the commands of a parser. Local."""
    _add_report(commands)
    _add_predict(commands)


def _add_report(commands: Commands) -> None:
    report = commands.add_parser(
        "report",
        help="build a page about a run: losses of all ranks, time, memory, guards, checkpoints, how it ended",
        description="Build a one-page report from each rank's records, as HTML that needs no network or as "
        "Markdown, and print its path. Exit code: 0 written, 2 nothing to report, or wrong usage.",
    )
    report.add_argument(
        "folder", type=Path, metavar="RUN_DIR", help="folder of the run: where config.json is, or above it"
    )
    report.add_argument(
        "--markdown", action="store_true", help="write Markdown: the same numbers, without charts (needs no matplotlib)"
    )
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write (default: report.html or report.md in RUN_DIR)"
    )
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    from ddpshim.observe.report.writing import write

    print(write(arguments.folder, arguments.out, arguments.markdown))
    return 0


def _add_predict(commands: Commands) -> None:
    predict = commands.add_parser(
        "predict",
        help="predict a run's speed on other numbers of GPUs, and what limits it",
        description="Predict, from the records of one run, its speed-up on other numbers of GPUs, what limits it "
        "there, and whether more would help (`python -m ddpshim docs report` explains how). Exit code: 0 "
        "predicted, 2 too few records, or wrong usage.",
    )
    predict.add_argument(
        "folder", type=Path, metavar="RUN_DIR", help="folder of the run: where config.json is, or above it"
    )
    text = "numbers of GPUs, with one rank each; a line for each number"
    predict.add_argument("--gpus", type=positive, nargs="+", required=True, metavar="N", help=text)
    text = "GPUs per node (8, or as many as in the run)"
    predict.add_argument("--gpus-per-node", type=positive, metavar="N", help=text)
    predict.add_argument("--json", action="store_true", help="for programs")
    predict.set_defaults(run=_predict)


def _predict(arguments: argparse.Namespace) -> int:
    from ddpshim.observe.predict import as_text, measured, predict

    run = measured(arguments.folder)
    found = [predict(run, number, arguments.gpus_per_node) for number in arguments.gpus]
    if arguments.json:
        print(json.dumps([prediction._asdict() for prediction in found], indent=2))
    else:
        print("\n".join(as_text(run, prediction) for prediction in found))
    return 0
