"""The first hour: what README and docs tell a new user to type, then 21 mistakes, each with the words that come.

    python -m evidence.newcomer [--python 3.9 --python 3.13] [--only WORDS]

Works in new folders without the sources, with the library of this Python, or with the wheel in an environment for each
Python named (as evidence/matrix.py makes them). The trainer, newcomer_train.py, knows nothing of ddpshim. Prints the
seconds of each step; the exit code is 1 if an exit code or a text was another one.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from evidence import matrix
from evidence.results import ROOT

OWN, SHARES, GLOBAL = "newcomer_train.py", "train_shares.py", "train_after.py"
FILES = (f"evidence/{OWN}", f"examples/{SHARES}", f"examples/{GLOBAL}", "examples/resume.py")
DEADLINE_S = 300
_RUN, _ROBOMIMIC = "ddpshim run --nproc 2", "-m robomimic.scripts.train --config lift_bc.json"
_WRAPPED, _LOSS = "ddpshim.wrap_parallel(Policy().to(device))", "loss = -policy.forward_train"
_MEAN = "loss = world.mean_over(loss * len(x), len(x)).item()"


@dataclass(frozen=True)
class Typed:
    """What a user types, with texts (regular expressions) that must come in this order, and the exit code."""

    name: str
    command: str
    says: str
    code: int = 0
    edit: tuple[str, str, str] = ("", "", "")  # a file, what the user has there, what he wrote instead
    variables: str = ""


HOUR = (
    Typed("the self-test", "ddpshim selftest", "selftest passed"),
    Typed("own trainer, in one process", f"{OWN} one", "epoch 2: contrast"),
    Typed("on 2 ranks", f"{_RUN} {OWN} two", "2 ranks on this machine.*epoch 2: contrast.*6-8 digits"),
    Typed("on 3 ranks", f"ddpshim run --nproc 3 {OWN} three", "3 ranks on this machine.*epoch 2: contrast"),
    Typed("1 and 2 compared", "ddpshim report one two", "the same experiment up to rounding"),
    Typed("1 and 3 compared", "ddpshim report one three", "the same experiment up to rounding"),
    Typed("check, 2 data workers", f"ddpshim check --nproc 3 {OWN} out", "the same experiment: yes"),
    Typed("a certificate", f"{_RUN} --certify run.json --certify-every 6 {OWN} four", "certifies 18 steps"),
    Typed("checked on 1 rank", "ddpshim check --certificate run.json --nproc 1", "verified: steps 12 to 18"),
    Typed("the three lines", f"{_RUN} {GLOBAL}", "epoch 4: loss 1.4915"),
    Typed(
        "stopped, resumed",
        "resume.py --demo",
        r"left after \d+ steps.*continued on 3 ranks: \d+ steps; 160 of 160 had the same",
    ),
    Typed("pages by words", "ddpshim docs resume", "Resume your own trainer"),
    Typed("robomimic: an example", "ddpshim example", "lift_bc.json"),
    Typed("robomimic, on 2 ranks", f"{_RUN} {_ROBOMIMIC}", ""),
    Typed("robomimic alone", f"{_ROBOMIMIC} --name plain", ""),
    Typed(
        "both compared", "ddpshim report lift_bc/plain lift_bc/lift_bc --markdown", "the same experiment up to rounding"
    ),
)
MISTAKES = (
    Typed("python before the trainer", f"{_RUN} python {OWN} out", "leave python out", 2),
    Typed("an option after it", f"ddpshim run {OWN} out --nproc 2", "--nproc stands after .* Put it first", 2),
    Typed("a misspelt file", f"{_RUN} newcomer_trian.py out", "newcomer_trian.py does not exist", 2),
    Typed("a misspelt command", f"ddpshim chek {OWN}", "did you mean check", 2),
    Typed(
        "a misspelt option", f"{_RUN} {OWN} out", "no such option; did you mean DDPSHIM_EXACT", 2, variables="EXAKT=4"
    ),
    Typed("a wrong value", f"{_RUN} {OWN} out", "EXACT: 'yes'; allowed: a whole number", 2, variables="EXACT=yes"),
    Typed("two, not 2", f"ddpshim run --nproc two {OWN} out", "'two' is not a whole number", 2),
    Typed("GPUs that are not there", f"ddpshim run --nproc gpu {OWN} out", "torch sees no GPU", 2),
    Typed("nodes without an address", f"ddpshim run --nnodes 2 {OWN} out", "without --node-rank and --master-addr", 2),
    Typed("no run there", "ddpshim report nowhere", "nowhere holds no records", 2),
    Typed("the wrong door", f"{_RUN} {GLOBAL}", 'Use "local" .* or "global"', 1, (GLOBAL, '"global"', '"whole"')),
    Typed(
        "no setup", f"{_RUN} {SHARES}", "Call ddpshim.setup", 1, (SHARES, "ddpshim.setup(seed=1)", "ddpshim.world()")
    ),
    Typed("not wrapped", f"{_RUN} {SHARES}", "no network was wrapped", 1, (SHARES, _WRAPPED, "Policy().to(device)")),
    Typed("a batch of 100 on 3", f"ddpshim run --nproc 3 {SHARES}", 'does not split over 3 .*batch="global"', 1),
    Typed(
        "DDP around it",
        f"{_RUN} {SHARES}",
        "leave wrap_parallel out",
        1,
        (SHARES, _WRAPPED, f"nn.parallel.DistributedDataParallel({_WRAPPED})"),
    ),
    Typed(
        "a mean on rank 0 only",
        f"{_RUN} {SHARES}",
        "has waited .* in World.mean_over .*train_shares.py:33",
        1,
        (SHARES, _MEAN, f"{_MEAN} if world.is_main else 0.0"),
        "TIMEOUT_S=20",
    ),
    Typed(
        "an error on rank 1",
        f"{_RUN} {SHARES}",
        "rank 1 failed first: AssertionError: only here",
        1,
        (SHARES, _LOSS, f"assert world.is_main, 'only here'\n            {_LOSS}"),
    ),
    Typed(
        "a loss that is NaN",
        f"{_RUN} {GLOBAL}",
        "the loss is NaN in backward pass 1 .*train_after.py:35",
        0,
        (GLOBAL, ".mean()", ".mean().log()"),
    ),
    # What others refuse, or compute wrongly, is right here.
    Typed(
        "wrapped twice",
        f"{_RUN} {SHARES}",
        "epoch 4: loss 1.4286",
        0,
        (SHARES, _WRAPPED, f"ddpshim.wrap_parallel({_WRAPPED})"),
    ),
    Typed("past its wrapper", f"{_RUN} {SHARES}", "epoch 4: loss 1.4286", 0, (SHARES, "policy.fo", "policy.module.fo")),
    Typed(
        "more ranks than samples",
        f"ddpshim run --nproc 4 {OWN} out --epochs 1",
        "epoch 0: contrast",
        0,
        (OWN, "batch_size=50", "batch_size=3"),
    ),
)


def tried(typed: Typed, interpreter: Path, folder: Path) -> str:
    """Run what is typed in `folder`; return what was wrong with it, or ''."""
    for file in FILES:
        shutil.copy(ROOT / file, folder)
    file, before, after = typed.edit
    if file:
        text = (folder / file).read_text()
        assert before in text, f"{typed.name}: {file} has no {before}"
        (folder / file).write_text(text.replace(before, after))
    words = typed.command.split()
    command = [str(interpreter), *(["-m"] if words[0] == "ddpshim" else []), *words]
    variables = {f"DDPSHIM_{name}": value for name, _, value in [typed.variables.partition("=")] if name}
    environ = {**matrix.environ(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    ran = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if ran.returncode != typed.code:
        return f"exit code {ran.returncode}, not {typed.code}:\n{ran.stdout}"
    return "" if re.search(typed.says, ran.stdout, re.DOTALL) else f"said nothing like {typed.says!r}:\n{ran.stdout}"


def first_hour(interpreter: Path, only: str) -> int:
    """Type everything; return how much of it was wrong."""
    num_wrong, start = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as one:
        for typed in (*HOUR, *MISTAKES):
            if only not in typed.name:
                continue
            began = time.monotonic()
            with contextlib.ExitStack() as stack:
                other = typed in MISTAKES
                folder = stack.enter_context(tempfile.TemporaryDirectory()) if other else one
                wrong = tried(typed, interpreter, Path(folder))
            num_wrong += bool(wrong)
            print(f"{time.monotonic() - began:5.0f} s  {typed.name}: {wrong or 'as expected'}", flush=True)
    print(f"{num_wrong} wrong, {(time.monotonic() - start) / 60:.0f} minutes")
    return num_wrong


def install_robomimic(interpreter: Path, python: str) -> None:
    """Type the lines of docs/start.md for an environment that has torch but not torchvision."""
    install = ("uv", "pip", "install", "-q", "--python", str(interpreter))
    matrix.run(*install, "-r", str(ROOT / "requirements" / "robomimic.txt"))
    vision = "torchvision==0.16.2" if python in ("3.9", "3.10", "3.11") else "torchvision"
    matrix.run(*install, "--no-deps", "robomimic==0.3.0", vision)


def in_new_environment(python: str, only: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        matrix.run("uv", "build", "-q", "--wheel", "--out-dir", folder, str(ROOT))
        with matrix.environment(python, "newest", next(Path(folder).glob("*.whl"))) as interpreter:
            install_robomimic(interpreter, python)
            print(
                f"Python {python}, torch {matrix.run(str(interpreter), '-c', 'import torch; print(torch.__version__)')}"
            )
            return first_hour(interpreter, only)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", choices=matrix.PYTHONS, action="append", help="in a new environment, with the wheel"
    )
    parser.add_argument("--only", default="", help="what has these words in its name")
    given = parser.parse_args()
    numbers = [in_new_environment(python, given.only) for python in given.python or ()]
    sys.exit(any(numbers) if given.python else first_hour(Path(sys.executable), given.only) > 0)
