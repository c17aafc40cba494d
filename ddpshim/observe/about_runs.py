"""Defines the commands that read a run's records: report and predict."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ddpshim.arguments import natural, positive

if TYPE_CHECKING:
    from ddpshim.arguments import Commands

_BELOW_RUN = Path()  # --to-wandb without DIR


def add(commands: Commands) -> None:
    """Add both commands to a parser. Local."""
    _add_report(commands)
    _add_predict(commands)


def _add_report(commands: Commands) -> None:
    report = commands.add_parser(
        "report",
        help="build a page about a run: success, losses, time, guards, how it ended; or compare several runs",
        description="Build a one-page report from the records of a run, as HTML that needs no network or as Markdown, "
        "and print its path; with several runs, compare them. With --serve, show a page that refreshes while the run "
        "trains, until Ctrl-C. Exit code: 0 written or served, 2 nothing to report, or wrong usage.",
    )
    text = "folder of the run: where config.json is, or above it; several are compared with the first"
    report.add_argument("folder", type=Path, nargs="+", metavar="RUN_DIR", help=text)
    text = "where to write (default: report.html or .md in RUN_DIR; for several, comparison.html or .md here)"
    report.add_argument("--out", type=Path, metavar="FILE", help=text)
    ways = report.add_mutually_exclusive_group()
    ways.add_argument("--markdown", action="store_true", help="the same numbers without charts; needs no plotly")
    text = "show a page on 127.0.0.1 that refreshes while the run trains; write nothing"
    ways.add_argument("--serve", action="store_true", help=text)
    text = "write the curves of the mean and of each rank below DIR, as TensorBoard events"
    ways.add_argument("--to-tensorboard", type=Path, metavar="DIR", help=text)
    text = "the same as an offline W&B run, for `wandb sync` (default: below RUN_DIR)"
    ways.add_argument("--to-wandb", type=Path, metavar="DIR", nargs="?", const=_BELOW_RUN, help=text)
    report.add_argument("--port", type=natural, default=8000, help="port of --serve (default 8000; 0: a free one)")
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    if arguments.serve:
        from ddpshim.observe.report.serving import serve

        serve(arguments.folder, arguments.port)
        return 0
    from ddpshim.observe.report.writing import export, write

    for kind, out in (("tensorboard", arguments.to_tensorboard), ("wandb", arguments.to_wandb)):
        if out is not None:
            print(*export(arguments.folder, None if out is _BELOW_RUN else out, kind), sep="\n")
            return 0
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
