"""Parses the command line of `ddpshim` (`python -m ddpshim`), and prints what its commands return.

Each sub-command imports its modules when it runs: patching needs no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Optional, Union

from ddpshim import variables, version
from ddpshim.errors import DdpShimError, LaunchError, ReportError
from ddpshim.lazy import nearest
from ddpshim.options import Options
from ddpshim.process.say import say
from ddpshim.tools import first_steps
from ddpshim.trainers import patching

if TYPE_CHECKING:
    from ddpshim.launch.runner import Launch

    Commands = argparse._SubParsersAction["Parser"]


_NPROC = ("--nproc", "--nproc-per-node")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):  # file names may contain characters that the terminal's encoding lacks
        with contextlib.suppress(AttributeError, OSError):  # a test's stream, or one that cannot seek
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
        if getattr(arguments, "starts_ranks", False):
            _refuse_without_torch_or_fork()
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except DdpShimError as error:
        say(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader (`| head`) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 1
    except OSError as error:
        say(f"{error}; the command stopped. Name files and folders that it can read and write.")
        return 2


def script() -> int:
    """Run the installed command `ddpshim`, the same as `python -m ddpshim`."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 on: with -P, sys.path[0] is not the command's folder
        sys.path[0] = os.getcwd()  # as `python -m` does, so that trainers and trees to patch are found there
    return main()


def _refuse_without_torch_or_fork() -> None:
    """Raise LaunchError if torch is missing or too old, or on Windows. It imports no torch, which takes seconds."""
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(
            f"torch is not installed for {sys.executable}, so no rank can start. Run ddpshim from the environment "
            "that you train in, or install torch here: pip install torch (https://pytorch.org/get-started/locally)."
        )
    try:
        version.check_torch()
    except ImportError as error:
        raise LaunchError(str(error)) from None
    if not hasattr(os, "fork"):
        raise LaunchError(
            f"this is {sys.platform}, where a process cannot be forked; nothing was started, as ranks need that. Use "
            "Linux (on Windows: WSL), or one process here: python train.py and patch work."
        )


def _parser() -> argparse.ArgumentParser:
    prog = "ddpshim" if Path(sys.argv[0]).stem == "ddpshim" else "python -m ddpshim"
    text = "Run a single-GPU PyTorch trainer on several GPUs, unmodified, with the same numbers."
    parser = Parser(prog=prog, description=text, example="run --nproc 2 train.py --epochs 10")
    parser.epilog = (
        "Exit codes: 0 success; 1 the answer is no (findings, a patch that does not fit, a different experiment); 2 "
        "nothing was done (wrong usage, a missing file, a job that could not start); 130 Ctrl-C. run also "
        "returns the exit code of a failed rank."
    )
    parser.add_argument("--version", action="version", version=f"ddpshim {version.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_check(commands)
    patching.add(commands)
    _add_report(commands)
    _add_selftest(commands)
    _add_slurm(commands)
    first_steps.add(commands)
    return parser


def _add_report(commands: Commands) -> None:
    report = commands.add_parser(
        "report",
        example="out/one_gpu out/two_gpus",
        help="build a page about a run: loss, success, time, how it ended; or compare the numbers of any two runs",
        description="With one folder, build a one-page report from the records of a run, as HTML that needs no "
        "network, and print its path. With two, of any trainers, print in how many digits their numbers agree, and "
        "whether they are the same experiment: records, TensorBoard events, CSV or JSON lines "
        "(`python -m ddpshim docs check`). Exit code: 0 written, or the same experiment; 1 another experiment; 2 "
        "nothing to report or to compare.",
    )
    text = "folder of a run; two or more folders or files are compared with the first"
    report.add_argument("folder", type=Path, nargs="+", metavar="RUN_DIR", help=text)
    text = "where to write (default: report.html in RUN_DIR; Markdown and comparisons: the screen)"
    report.add_argument("--out", type=Path, metavar="PATH", help=text)
    report.add_argument("--markdown", action="store_true", help="print the report without charts; needs no plotly")
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    from ddpshim.observe import digits, report

    (first, *others), out = arguments.folder, arguments.out
    code, text = 0, ""
    for other in others:
        found, verdict = digits.compare(first, other)
        text += f"{first} and {other}: {verdict}\n\n{report.as_markdown(digits.table(found))}"
        code = max(code, int(verdict.startswith("another")))
    if not others:
        try:
            run = report.load(first)
            text = report.markdown(run) if arguments.markdown else report.html(run)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ReportError(
                f"the records of {first} hold values that ddpshim does not write ({error!r}); there is nothing to "
                "report. Get the files again from where the run wrote them."
            ) from None
        if not arguments.markdown:
            out = out or run.folder / "report.html"
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8", errors="replace")  # JSON may hold half a surrogate pair
        print(out)
    return code


def _add_selftest(commands: Commands) -> None:
    text = "start ranks, and check that they can communicate and train as one process does"
    selftest = commands.add_parser("selftest", help=text, description=text, example="--nproc 2")
    selftest.add_argument(*_NPROC, type=positive, metavar="N", help="ranks (default: the number of GPUs, but 2 to 8)")
    text = "time limit for each of its jobs, in seconds (120)"
    selftest.add_argument("--timeout", type=positive, default=120, metavar="S", dest="timeout_s", help=text)
    selftest.add_argument("--gpu", action="store_true", help="refuse a machine whose GPUs torch does not see")
    selftest.set_defaults(run=_selftest, starts_ranks=True)


def _selftest(arguments: argparse.Namespace) -> int:
    from ddpshim.tools import selftest

    is_good = selftest.selftest(arguments.nproc, arguments.gpu, arguments.timeout_s)
    print(f"selftest {'passed' if is_good else 'failed'}")
    return 0 if is_good else 1


def _add_check(commands: Commands) -> None:
    check = commands.add_parser(
        "check",
        example="train.py --epochs 1",
        help="check that a trainer runs the same experiment on several ranks as in one process",
        description="Run a few steps of a trainer in one process and on several ranks, compare batches, losses and "
        "weights, and print yes, or the first difference (`python -m ddpshim docs check`). The trainer's output "
        "goes to ddpshim-logs, and new files that it makes are removed. Exit code: 0 the same, 1 different or wrong, "
        "2 unknown, or nothing could be compared.",
    )
    text = "repeat a part of a certified run (`run --certify FILE`), and compare its bits; --nproc 1 will do"
    check.add_argument("--certificate", type=Path, metavar="FILE", help=text)
    check.add_argument(*_NPROC, type=positive, metavar="N", help="ranks on this node (2; certificate: 1)")
    text = "optimizer steps (20); with --certificate A:B (the last ones)"
    check.add_argument("--steps", type=steps, metavar="K", help=text)
    text = "the single-process trainer and its arguments, as one quoted word (default: the same command)"
    check.add_argument("--one", metavar="COMMAND", help=text)
    text = "time limit for a run in one process (300 seconds)"
    check.add_argument("--timeout", type=positive, default=300, metavar="S", help=text)
    text = "folder for check.md, a page with the answer, and the output of each process (ddpshim-logs/TIME-PID)"
    check.add_argument("--log-dir", metavar="DIR", help=text)
    text = 'check the trainer\'s own DDP: leave the trainer alone, and exit with 0 also after "no, by design"'
    check.add_argument("--own-ddp", action="store_true", help=text)
    check.add_argument("--json", action="store_true", help="print the answer as JSON, for programs")
    _add_program(check, nargs="?")
    check.set_defaults(run=_check, error=check.error, default_nproc=2, starts_ranks=True)


def _check(arguments: argparse.Namespace) -> int:
    from ddpshim.tools.check import as_text, check
    from ddpshim.tools.watching import ProofSettings

    if arguments.steps is not None and isinstance(arguments.steps, int) is (arguments.certificate is not None):
        arguments.error("argument --steps: give how many to compare; with --certificate the first and the last, as A:B")
    if arguments.certificate is not None:
        return _check_certificate(arguments)
    if arguments.program is None:
        arguments.error("the following arguments are required: program")
    job, alone = _launch(arguments), None
    if arguments.nproc < 2:
        arguments.error(
            "argument --nproc/--nproc-per-node: must be at least 2: one rank has nothing to be compared with"
        )
    if arguments.one:
        try:
            words = shlex.split(arguments.one)
        except ValueError as unclosed:
            arguments.error(f"argument --one: {unclosed}: {arguments.one!r}")
        alone = _launch(_parser().parse_args(["run", "--nproc", "1", *words]))
    settings = ProofSettings(arguments.steps or 20, arguments.nproc, arguments.timeout)
    proof = check(job, settings, alone, arguments.own_ddp)
    print(_as_json(proof) if arguments.json else as_text(proof))
    is_right = proof.is_same or (arguments.own_ddp and bool(proof.by_design))
    return int(bool(proof.wrong)) or (2 if proof.is_unknown else int(not is_right))


def _check_certificate(arguments: argparse.Namespace) -> int:
    from ddpshim.tools.certificate import as_text, verify

    num_ranks = arguments.nproc or 1
    verdict = verify(arguments.certificate, _launch(arguments), arguments.steps, num_ranks)
    print(_as_json(verdict) if arguments.json else as_text(verdict, num_ranks))
    return 0 if verdict.is_verified else 1


def _as_json(answer: Any) -> str:
    """Return what `--json` prints; `schema` changes with every change that a program reading it could notice."""
    return json.dumps({"schema": 1, **asdict(answer)}, indent=2)


def _add_run(commands: Commands) -> None:
    heeded = [*variables.OF_USERS, *(f"{variables.PREFIX}{name.upper()}" for name in Options.names())]
    run = commands.add_parser(
        "run",
        example="--nproc 2 train.py --epochs 10",
        help="train on this node's GPUs, or on several nodes",
        description="Launch a trainer through torchrun. The command is checked first; each rank has a log; the "
        "first failure is printed last. Exit code: that of the rank that failed first, 128 + N if signal N "
        "ended it, 2 if nothing could be started.",
        epilog="Pages: `python -m ddpshim docs run`, and `launch` for several nodes, logs and resuming. Environment "
        f"variables (`docs options`): {', '.join(heeded)}.",
    )
    text = "ranks on this node; auto: one for each GPU, else for each core"
    run.add_argument(*_NPROC, type=nproc, metavar="N|gpu|cpu|auto", help=text)
    run.add_argument("--nnodes", type=positive, metavar="N", help="number of nodes; start `run` on each of them")
    run.add_argument("--node-rank", type=natural, metavar="N", help="this node's number, from 0")
    run.add_argument("--master-addr", metavar="HOST", help="the address of node 0")
    run.add_argument("--master-port", type=port, metavar="PORT", help="a free port on node 0 (29500)")
    text = "restart all ranks up to N times if one fails (0)"
    run.add_argument("--max-restarts", type=natural, default=0, metavar="N", help=text)
    logs = run.add_mutually_exclusive_group()
    logs.add_argument("--log-dir", metavar="DIR", help="folder for rank_0.log, rank_1.log ... (ddpshim-logs/TIME-PID)")
    text = "no log files; all ranks write to the screen"
    logs.add_argument("--no-logs", dest="has_logs", action="store_false", help=text)
    text = "seconds that ranks have to stop after SIGTERM or Ctrl-C (60)"
    run.add_argument("--grace", type=natural, default=60, metavar="S", dest="grace_s", help=text)
    text = "write a certificate, with which others can check the run (`python -m ddpshim docs check`)"
    run.add_argument("--certify", type=Path, metavar="FILE", help=text)
    text = "with --certify: optimizer steps between two hashes of the weights (100)"
    run.add_argument("--certify-every", type=positive, default=100, metavar="K", help=text)
    _add_program(run)
    run.set_defaults(run=_run, default_nproc="auto", starts_ranks=True)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.certify is not None:
        from ddpshim.tools.certificate import certify

        return certify(arguments.certify, arguments.certify_every, _launch(arguments))
    from ddpshim.launch.runner import run

    return run(_launch(arguments))


def _launch(arguments: argparse.Namespace) -> Launch:
    from ddpshim.launch.runner import Launch

    given = {field.name: getattr(arguments, field.name) for field in fields(Launch) if field.name in arguments}
    if "nproc" in arguments and arguments.nproc is None:
        after = [word for word in arguments.arguments if word.partition("=")[0].replace("_", "-") in _NPROC]
        if after:
            raise LaunchError(
                f"{after[0]} stands after {arguments.program}, so it is the program's own argument, and says nothing "
                f"about ranks. Put it first: --nproc N {arguments.program}. If the program has such an argument, give "
                "both."
            )
        given["nproc"] = arguments.nproc = arguments.default_nproc
    command = [*["-m"] * arguments.is_module, arguments.program, *arguments.arguments] if arguments.program else []
    return Launch(command, **given)


def _add_slurm(commands: Commands) -> None:
    slurm = commands.add_parser(
        "slurm",
        example="--gpus-per-node 4 --time 12:00:00 train.py > job.sh",
        help="print an sbatch script for a trainer",
        description="Print an sbatch script. SLURM signals the trainer before the time limit; if the trainer saves and "
        "exits with code 75, the job is requeued. Redirect the script into a file, read it, and `sbatch` it. If "
        "the trainer does not exist on this machine, that is only a warning: the job may run elsewhere.",
    )
    slurm.add_argument("--nodes", "--nnodes", type=positive, default=1, metavar="N", help="nodes (1)")
    text = "GPUs of each node, 0 for the CPU (1)"
    slurm.add_argument("--gpus-per-node", type=natural, default=1, metavar="N", help=text)
    text = "ranks on each node (one for each GPU)"
    slurm.add_argument("--nproc-per-node", "--nproc", type=positive, metavar="N", help=text)
    text = "cores for each rank: 1, and 1 for each of its data workers (1 if `run` starts several, else the site's)"
    slurm.add_argument("--cpus-per-rank", type=positive, metavar="N", help=text)
    slurm.add_argument("--time", type=time_limit, metavar="TIME", help="time limit for sbatch: 2-12, 12:00:00, 30")
    text = "torchrun: `run` starts the ranks of a node; srun: each rank is a task, of a program that imports ddpshim"
    slurm.add_argument("--launcher", choices=("srun", "torchrun"), default="torchrun", help=f"{text} (torchrun)")
    _add_program(slurm)
    slurm.set_defaults(run=_slurm)


def _slurm(arguments: argparse.Namespace) -> int:
    from ddpshim.launch.runner import problems_of_program
    from ddpshim.launch.slurm import batch_script

    program = _launch(arguments).command
    print(batch_script(program, arguments), end="", flush=True)
    for problem in problems_of_program(program):
        say(
            f"{problem} (The script was printed anyway: the job may run on another machine. A relative path is "
            "relative to the folder in which you call sbatch.)"
        )
    return 0


def _add_program(parser: argparse.ArgumentParser, nargs: Optional[str] = None) -> None:
    """Add the trainer and its arguments, which are passed to it unchanged."""
    parser.usage = "%(prog)s [options] (script.py | -m package.module) [arguments]"
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("program", nargs=nargs, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


class Parser(argparse.ArgumentParser):
    """An argparse parser with torchrun's spellings and suggestions, for the command and its sub-commands.

    Options also work in torchrun's spelling (`--nproc_per_node`); abbreviations do not. A wrong option or command
    prints the usage of the sub-command and the nearest name. A group without a command prints its help, which begins
    with an example.
    """

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._example = example

    def format_help(self) -> str:
        return f"example: {self.prog} {self._example}\n\n{super().format_help()}"

    def parse_known_args(self, args: Optional[Sequence[str]] = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self.allow_abbrev, options = False, self._option_string_actions
        for name in [*options]:
            options.setdefault(re.sub(r"(?<=\w)-", "_", name), options[name])
        if self.get_default("run") is None and not args:
            self.print_help()
            self.exit()
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            name = rest[0].partition("=")[0]
            known = [option for option in options if "_" not in option]
            self.error(f"unrecognized arguments: {' '.join(rest)}{nearest(name, known)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        super().error(message + ("" if wrong is None else nearest(wrong[1], re.findall(r"[\w-]+", wrong[2]))))


def natural(text: str, least: int = 0, most: int = 999_999_999) -> int:
    """A whole number within these bounds."""
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number of at least {least} and at most {most}")
    return int(text)


positive, port = functools.partial(natural, least=1), functools.partial(natural, least=1, most=65535)


def nproc(text: str) -> str:
    """A number of ranks, or one of torchrun's words: auto, gpu, cpu, xpu."""
    if not re.fullmatch("auto|gpu|cpu|xpu|[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number of at least 1, nor gpu, cpu or auto")
    return text


def time_limit(text: str) -> str:
    """A time limit that sbatch takes."""
    if not re.fullmatch("([0-9]+-[0-9]+|[0-9]+)(:[0-9]+){0,2}|unlimited|infinite", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not minutes (30), hours:minutes:seconds or days-hours (2-12)"
        )
    return text


def steps(text: str) -> Union[int, tuple[int, int]]:
    """A number of steps from 1 up, or with a colon the first and the last one."""
    first, colon, last = text.partition(":")
    return (natural(first), positive(last)) if colon else positive(text)


if __name__ == "__main__":
    sys.exit(main())
