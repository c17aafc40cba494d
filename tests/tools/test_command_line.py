"""Every sub-command, of today and of tomorrow: its help, a wrong flag, a file that is missing, a Python without torch.

The commands are found in the parser. One that is new fails here until SAMPLES, and MISSING for each option that takes a
file, say how to call it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import ddpshim
import ddpshim.__main__ as command_line
from ddpshim.options import Options
from ddpshim.tools import first_steps
from tests import without_posix
from tests.preloaded_commands import python

ROOT = Path(__file__).parents[2]
Command = tuple[str, ...]


def _parsers(parser: argparse.ArgumentParser, above: Command = ()) -> Iterator[tuple[Command, argparse.ArgumentParser]]:
    """Each sub-command by its words, groups (`patch`) and the command itself included."""
    yield above, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _parsers(below, (*above, name))


PARSERS = dict(_parsers(command_line._parser()))
COMMANDS = [command for command, parser in PARSERS.items() if parser.get_default("run") is not None]
NEED_TORCH = [command for command in COMMANDS if PARSERS[command].get_default("starts_ranks")]

# How each is called in a folder with `train.py`, a robomimic that no patch set fits, and the records of a run. Targets
# are paths: a name would be the package that is installed beside these tests, which `apply` would change.
OF_TARGETS: list[Command] = [("patch", name) for name in ("status", "check", "apply", "revert")]
SAMPLES: dict[Command, list[str]] = {
    **{command: ["--target", "installed/robomimic"] for command in OF_TARGETS},
    ("patch", "manifest"): ["patches", "--source", "tree", "--base", "abc"],
    ("run",): ["--nproc=2", "train.py", "--lr", "1"],
    ("slurm",): ["--time", "30", "train.py", "--lr", "1"],
    ("example",): ["--out", "example"],
    ("docs",): ["launch"],
    ("selftest",): [],
    ("check",): ["train.py"],
    ("report",): ["run", "--markdown"],
}

# For each option that takes a file or folder: a call in which that is missing, and the exit code.
MISSING: dict[tuple[Command, str], tuple[list[str], int]] = {
    **{(command, "target"): (["--target", "absent"], 2) for command in OF_TARGETS},
    (("patch", "manifest"), "directory"): (["absent", "--source", "tree", "--base", "abc"], 2),
    (("patch", "manifest"), "source"): (["patches", "--source", "absent", "--base", "abc"], 2),
    (("patch", "manifest"), "borrow"): ([*SAMPLES["patch", "manifest"], "--borrow", "absent/01.patch"], 2),
    (("run",), "program"): (["absent.py"], 2),
    (("run",), "certify"): (["--certify", "absent/run.json", "train.py"], 2),
    (("check",), "certificate"): (["--certificate", "absent.json"], 2),
    (("run",), "log_dir"): (["--log-dir", "train.py/absent", "train.py"], 2),
    (("slurm",), "program"): (["absent.py"], 0),  # a warning: the job may find it
    (("check",), "program"): (["absent.py"], 2),
    (("check",), "log_dir"): (["--log-dir", "train.py/absent", "train.py"], 2),
    (("example",), "out"): (["--out", "train.py/absent"], 2),
    (("report",), "folder"): (["absent"], 2),
    (("report",), "out"): (["run", "--markdown", "--out", "train.py/absent"], 2),
}
MODULES = {command: MISSING[command, "program"][1] for command in COMMANDS if (command, "program") in MISSING}


def _id(value: Any) -> str:
    return "-".join(value) or "ddpshim"


def _takes_file(action: argparse.Action) -> bool:
    named = {*re.split(r"\W", str(action.metavar)), *re.split(r"\W", action.dest.upper())}
    return action.type is Path or bool(named & {"FILE", "DIR", "PATH", "FOLDER", "PROGRAM"})


def fill(folder: Path) -> None:
    (folder / "train.py").write_text("import torch\nmodel = torch.nn.Linear(1, 1)\n")
    (folder / "tree" / "package").mkdir(parents=True)
    (folder / "tree" / "package" / "module.py").write_text("a = 1\n")
    (folder / "patches").mkdir()
    (folder / "patches" / "one.patch").write_text(
        "--- a/package/module.py\n+++ b/package/module.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"
    )
    (folder / "installed" / "robomimic").mkdir(parents=True)
    (folder / "installed" / "robomimic" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    (folder / "run" / "ddpshim").mkdir(parents=True)
    start = {"kind": "start", "time": 1.0, "rank": 0, "start": 1, "world_size": 1}
    (folder / "run" / "ddpshim" / "rank_0.jsonl").write_text(json.dumps(start) + "\n")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The robomimic of this environment cannot be found, whatever a command takes for its target."""
    monkeypatch.setitem(sys.modules, "robomimic", None)
    assert importlib.util.find_spec("robomimic") is None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _call(argv: list[str]) -> int:
    try:
        return command_line.main(argv)
    except SystemExit as error:
        return int(error.code or 0)


def _check_message(text: str, found: str) -> None:
    """One line: what was found, what it would cause, what to do."""
    assert text.startswith("ddpshim: ")
    assert text.count("\n") == 1
    assert text.endswith((".\n", ".)\n"))
    assert found in text
    assert len(re.split(r": |; |\. ", text)) >= 4


@pytest.mark.parametrize("wrong", ["run train.py --nproc 2", "check train.py --nproc_per_node=2 --lr 1"])
def test_ranks_behind_the_program(wrong: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(wrong.split()) == 2
    said = capsys.readouterr().err
    assert "stands after train.py, so it is the program's own argument, and says nothing about ranks" in said
    given = command_line._parser().parse_args(["run", "--nproc", "3", "train.py", "--nproc", "4"])
    job = command_line._launch(given)
    assert (job.nproc, job.command) == ("3", ["train.py", "--nproc", "4"])


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("rnu", "run"),
        ("patch aply", "apply"),
        ("run --nprc 2 train.py", "--nproc"),
        ("check --step=3 train.py", "--steps"),
        ("slurm --gpus-per-nod 4 -- train.py", "--gpus-per-node"),
        ("train.py", "run train.py"),
    ],
)
def test_a_word_that_is_nearly_right(wrong: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(wrong.split()) == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


@pytest.mark.parametrize("command", COMMANDS, ids=_id)
def test_torchruns_spellings(command: Command) -> None:
    """Found in both spellings, before the program; what is behind it is the trainer's."""
    for option in [name for name in PARSERS[command]._option_string_actions if name.count("-") > 2]:
        action = PARSERS[command]._option_string_actions[option]
        value = {int: "3", float: "3", None: "x"}.get(action.type if action.nargs != 0 else int, "3")
        given = [option.replace("-", "_").replace("__", "--", 1), *([] if action.nargs == 0 else [value])]
        argv = [*command, *given, *SAMPLES[command], "--a_b"]
        if SAMPLES[command] and "program" in {a.dest for a in PARSERS[command]._actions}:
            arguments = command_line._parser().parse_args(argv)
            assert arguments.arguments[-1] == "--a_b"
            assert getattr(arguments, action.dest) not in (action.default, None)


@pytest.mark.parametrize("command", PARSERS, ids=_id)
def test_wrong_usage(command: Command, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the program, behind which everything is the trainer's. A group without a command prints its help."""
    wrongs = [[*command, "--no-such-flag", *SAMPLES.get(command, [])]]
    if command not in COMMANDS:
        assert _call([*command]) == 0
        assert capsys.readouterr().out.startswith("example: ")
        wrongs = [[*command, "no-such-command"], [*command, "--no-such-flag"]]
    for wrong in wrongs:
        assert _call(wrong) == 2
        out, err = capsys.readouterr()
        assert (out, err[:7]) == ("", "usage: ")
        assert command not in COMMANDS or "error: unrecognized arguments: --no-such-flag" in err


@pytest.mark.parametrize("command", PARSERS, ids=_id)
def test_help_begins_with_an_example_that_the_command_takes(command: Command) -> None:
    shown = PARSERS[command].format_help()
    example = shown.partition("\n")[0].replace("example: python -m ddpshim ", "").partition(" > ")[0]
    parsed = command_line._parser().parse_args(example.split())
    assert tuple(example.split()[: len(command)]) == command
    assert callable(parsed.run)
    if command == ("run",):
        assert {f"DDPSHIM_{name.upper()}" for name in Options.names()} <= {*re.findall("[A-Z_]+", shown)}


def test_every_command_and_every_option_that_takes_a_file_is_tried() -> None:
    assert set(SAMPLES) == set(COMMANDS)
    assert NEED_TORCH == [("run",), ("check",), ("selftest",)]
    takes_file = {(c, a.dest) for c in COMMANDS for a in PARSERS[c]._actions if _takes_file(a)}
    assert set(MISSING) == takes_file


@pytest.mark.parametrize(
    ("command", "name"), MISSING, ids=lambda value: value if isinstance(value, str) else _id(value)
)
def test_what_is_missing(command: Command, name: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(here.rglob("*"))
    argv, code = MISSING[command, name]
    assert _call([*command, *argv]) == code
    out, err = capfd.readouterr()
    assert bool(out) == (code == 0)
    _check_message(err, "absent")
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("command", MODULES, ids=_id)
def test_a_program_that_cannot_be_run(
    command: Command, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "open", Mock(side_effect=PermissionError(13, "Permission denied", "train.py")))
    for argv, said in (
        *((["-m", module], f"-m {module}: no such module") for module in ("absent", "absent.train", "json.absent")),
        (["--", "-m", "absent"], "-m absent: no such module"),
        (["tree"], "tree is a folder"),
        (["train.py"], "train.py cannot be read ([Errno 13] Permission denied: 'train.py')"),
    ):
        assert _call([*command, *argv]) == MODULES[command]
        _check_message(capsys.readouterr().err, said)


def test_a_near_name_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "imitate").mkdir()
    (here / "imitate" / "train.py").touch()
    for program, said in (
        (["trian.py"], "; did you mean train.py?"),
        (["imitate/trian.py"], "; did you mean imitate/train.py?"),
        (["-m", "imitate.trian"], f"(searched: {here / 'imitate'}, PYTHONPATH)"),
        (["-m", "imitate.trian"], "set PYTHONPATH; did you mean train?"),
    ):
        assert _call(["run", *program]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("time", ["banana", "1-", "12:00:00:00", "-1", "1.5"])
def test_a_time_that_sbatch_refuses(time: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(["slurm", f"--time={time}", "train.py"]) == 2
    assert f"{time!r} is not minutes (30)" in capsys.readouterr().err
    for good in ("30", "30:00", "12:00:00", "2-12", "2-12:30", "2-12:30:00", "UNLIMITED"):
        assert command_line.time_limit(good) == good


def test_files_that_cannot_be_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "patches" / "manifest.json").mkdir()
    assert _call(["patch", "manifest", *SAMPLES["patch", "manifest"]]) == 2
    _check_message(capsys.readouterr().err, "manifest.json cannot be written")
    assert _call(["report", "run", "--markdown", "--out", "tree"]) == 2
    _check_message(capsys.readouterr().err, "Is a directory: 'tree'; the command stopped")
    assert [path.name for path in here.rglob("*.partial")] == []
    assert _call(["patch", "status"]) == 2  # the package that is installed is out of reach
    _check_message(capsys.readouterr().err, "robomimic is not installed for ")


# What users look for, in their words: the page, and the heading or the row that answers.
QUESTIONS = {
    "kaggle": ("your_trainer", "| a notebook"),
    "colab": ("your_trainer", "| a notebook"),
    "gpu utilization low": ("run", "How much faster"),
    "slow": ("run", "How much faster"),
    "why is it not faster": ("run", "How much faster"),
    "batch does not fit": ("your_trainer", "not fit"),
    "CUDA out of memory": ("MIGRATION", "| `CUDA out of memory`"),
    "lora": ("your_trainer", "LoRA"),
    "freeze layers": ("your_trainer", "| frozen layers"),
    "seed": ("your_trainer", "| seeds"),
    "batch size": ("your_trainer", "| batch size"),
    "scale learning rate": ("your_trainer", "| batch size (total or per GPU), learning rate"),
    "my batch size (64)": ("your_trainer", "| batch size"),
    "batch norm": ("your_trainer", "| BatchNorm"),
    "OOM": ("your_trainer", "not fit"),
    "fine-tuning": ("your_trainer", "fine-tuning"),
    "data-parallel": ("your_trainer", "| DataParallel"),
    "Ctrl-C": ("your_trainer", "| Ctrl-C"),
    "cancel": ("your_trainer", "| Ctrl-C"),
    "hydra arguments": ("your_trainer", "| arguments"),
    "which GPUs": ("your_trainer", "| which GPUs"),
    "num_workers": ("your_trainer", "| data workers"),
    "every rank different crop": ("your_trainer", "random crops"),
    "RL PPO environment": ("your_trainer", "| environments"),
    "uninstall": ("limits", "| uninstall"),
    "undo patch": ("limits", "undo a patch"),
    "patch revert": ("patches/README", "patch revert"),
    "old torch": ("limits", "| old versions"),
    "python version": ("limits", "| old versions"),
    "what is not supported": ("limits", "not supported"),
    "overhead compared with DDP": ("run", "Overhead and speed"),
    "checkpoint module prefix state dict": ("your_trainer", "| checkpoints"),
    "does pip upgrade my torch": ("limits", "pip keeps your torch"),
    "port in use": ("MIGRATION", "a port in use"),
    "two nodes": ("launch", "two nodes"),
    "time-out": ("launch", "Hangs"),
    "proof for reviewers": ("check", "Certificates"),
    "how to install": ("start", "pip install"),
    "docker": ("start", "Docker"),
    "windows": ("limits", "| Windows"),
    "grad accumulation": ("your_trainer", "| gradient accumulation"),
    "gradient clipping": ("your_trainer", "gradient clipping"),
    "wandb": ("your_trainer", "| wandb"),
    "tensorboard": ("your_trainer", "| TensorBoard"),
    "mixed precision": ("your_trainer", "| mixed precision"),
    "torch.compile": ("your_trainer", "| torch.compile"),
    "ema": ("your_trainer", "| EMA"),
    "augmentation": ("your_trainer", "| augmentation"),
    "weighted sampler": ("your_trainer", "WeightedRandomSampler"),
    "webdataset": ("your_trainer", "WebDataset"),
    "early stopping": ("your_trainer", "early stopping"),
    "validation loss": ("your_trainer", "validation"),
    "progress bar": ("your_trainer", "progress bars"),
    "rollouts": ("your_trainer", "| rollouts"),
    "digits": ("same_experiment", "How many digits agree"),
    "deterministic": ("same_experiment", "The same bits"),
    "is my ddp correct?": ("check", "DDP"),
    "lerobot": ("other_codebases", "LeRobot"),
    "diffusion policy": ("other_codebases", "diffusion_policy"),
    "deepspeed": ("other_codebases", "DeepSpeed"),
    "resume training": ("your_trainer", "| resume"),
    "resume under SLURM": ("launch", "Resume your own trainer"),
    "preempted": ("launch", "Preemption and resuming"),
    "it hangs": ("launch", "Hangs"),
    "breakpoint": ("launch", "A debugger"),
    "fsdp": ("launch", "Sharding a large network"),
    "stopped": ("run", "When it is stopped"),
    "gloo": ("start", "| gloo, nccl |"),
    "EADDRINUSE": ("MIGRATION", "| `Address already in use`"),
    "unused parameters": ("your_trainer", "| frozen layers, unused parameters"),
    "peft": ("your_trainer", "LoRA (peft)"),
    "batch_size per GPU or total": ("your_trainer", "| batch size"),
    "GradScaler autocast": ("your_trainer", "GradScaler"),
    "resume on another number of GPUs": ("your_trainer", "| resume"),
    "will installing replace my torch": ("start", "does not replace your torch"),
    "nvidia-smi utilisation": ("run", "How much faster"),
    "low utilisation": ("run", "How much faster"),
    "continuous integration": ("check", "In CI"),
    "CI pytest": ("check", "In CI"),
    "how fast compared with hand-written DDP": ("run", "compared with hand-written DDP"),
    "DROID openpi": ("other_codebases", "openpi with DROID's RLDS data"),
}


def test_pages_are_listed_printed_and_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(["docs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert {"MIGRATION", "README", "check", "examples/README", "patches/README", "run", "start"} <= {*listed}
    for name in listed:
        assert _call(["docs", name]) == 0, name
        assert capsys.readouterr().out.startswith("# ")
    for words in ("migration", "docs/launch.md", "your-trainer", "other codebases", "../patches/README.md#nothing"):
        assert _call(["docs", *words.split()]) == 0
        assert len(capsys.readouterr().out.splitlines()) > 40, words
    assert _call(["docs", "same_experiment.md#the-same-bits"]) == 0
    assert capsys.readouterr().out.startswith("# The same bits\n\nSet `DDPSHIM_EXACT`")
    for words, (page, answer) in QUESTIONS.items():
        assert _call(["docs", *words.split()]) == 0
        said = capsys.readouterr().out
        first = "\n".join(said.splitlines()[:2])
        assert first.startswith(f"{page}: "), f"{words}: {first}"
        assert answer in first, f"{words}: {first}"
        assert len(said.splitlines()) <= 8
        assert said.endswith(f"The whole page: python -m ddpshim docs {page}\n")
    assert _call(["docs", "lanch"]) == 2
    assert "did you mean launch?" in capsys.readouterr().err
    assert _call(["docs", "how", "is", "it"]) == 2
    _check_message(capsys.readouterr().err, "no page matches 'how is it'")


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(first_steps, "_docs", Mock(side_effect=KeyboardInterrupt))
    assert _call(["docs"]) == 130
    assert capsys.readouterr() == ("", "ddpshim: interrupted\n")


# In one process for all: exit code, output, error, and the seconds of the processor.
_WITHOUT_TORCH = """
import contextlib, io, json, sys, time
for name in ("torch", "plotly", "robomimic"):
    sys.modules[name] = None
import ddpshim.__main__ as command_line

answers = []
for argv in json.loads(sys.argv.pop()):
    out, err, start = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = command_line.main(argv)
        except SystemExit as error:
            code = error.code
        except Exception as error:
            code = repr(error)
    answers.append([code, out.getvalue(), err.getvalue(), time.process_time() - start])
print(json.dumps(answers))
"""
CALLS = [
    *([*command, "--help"] for command in PARSERS),
    *([*command, *argv] for command, argv in SAMPLES.items()),
    ["report", "run"],
]


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each of CALLS gave where neither torch nor plotly can be imported."""
    folder = tmp_path_factory.mktemp("without_torch")
    fill(folder)
    said = python("-c", f"import sys; sys.stderr = sys.stdout\n{_WITHOUT_TORCH}", json.dumps(CALLS), cwd=folder)
    return dict(zip(map(" ".join, CALLS), json.loads(said)))


def test_without_torch_and_plotly(
    without_torch: dict[str, Any], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Help and what needs no torch are as they are with it; what needs it says so at once."""
    for command in PARSERS:
        code, out, err, _ = without_torch[" ".join([*command, "--help"])]
        assert (code, err, out[:9]) == (0, "", "example: ")
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it where it is closed: that makes no difference either
    for command in COMMANDS:
        code, out, err, cpu_s = without_torch[" ".join([*command, *SAMPLES[command]])]
        if command in NEED_TORCH:
            assert (code, out) == (2, "")
            _check_message(err, f"torch is not installed for {sys.executable}")
            assert "pip install torch" in err
            assert cpu_s < 0.5
        else:
            assert _call([*command, *SAMPLES[command]]) == code
            found = [re.sub(r"/\S*/", "", text) for text in (out, err)]
            assert found == [re.sub(r"/\S*/", "", text) for text in capsys.readouterr()]
            assert out or err
    code, out, err, _ = without_torch["report run"]
    assert (code, out) == (0, "run/report.html\n")
    assert "plotly is not installed, so the page has no charts; pip install plotly adds them" in err


@pytest.mark.launch
def test_the_shell_completes_commands_and_options() -> None:
    shtab = pytest.importorskip("shtab", reason="pip install -r requirements/completion.txt")
    parser = command_line._parser()
    parser.prog = "ddpshim"
    script = shtab.complete(parser, "bash")
    for words, expected in (("pa", {"patch"}), ("patch re", {"revert"}), ("check --st", {"--steps"})):
        typed = ["ddpshim", *words.split()]
        tab = f"COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; _shtab_ddpshim ddpshim {typed[-1]}"
        said = subprocess.run(
            ["bash", "-c", f'{script}\n{tab}; echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True, check=True
        )
        assert {*said.stdout.split()} == expected


@pytest.mark.launch
def test_on_a_system_that_is_not_posix(here: Path) -> None:
    """Importing, one process, reading and patch work as they are; what starts ranks says what it needs."""
    (here / "train.py").write_text((ROOT / "examples" / "train_before.py").read_text())
    answers = json.loads(python("-m", "tests.without_posix"))
    assert answers.pop("import") == [len(ddpshim.__all__), "", ""]
    losses, out, err = answers.pop("train")
    assert (out, err) == ("", "")
    assert len(losses) == 4, losses
    assert "DataError: this is linux, and processes share arrays through Linux's /proc" in answers.pop("share")[0]
    for words, (code, out, err) in answers.items():
        if words.split() in without_posix.START_RANKS:
            assert (code, out) == (2, "")
            _check_message(err, "a process cannot be forked")
        else:
            assert (code, err) == (int(words.startswith("check")), ""), words  # it has findings
            assert out
