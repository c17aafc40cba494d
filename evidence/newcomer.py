"""Does what a new user does: `python -m evidence.newcomer` prints the seconds of each step, and exits 1 at a miss.

It builds the wheel (or takes `--wheel`), and in a new folder and a new environment of each Python it runs the commands
of README's first screen, with the wheel instead of the clone and two ranks instead of four; bootstrap.py needs the
clone. The user's own trainer is examples/any_trainer/train_dataparallel.py, unedited. Then it makes the mistakes that
new users make, each of which has to be answered in the promised words. It needs a package index and 6 GB, for one
environment at a time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from evidence.matrix import find

ROOT = Path(__file__).resolve().parent.parent
MOST_S = 300  # until a policy is trained, without the downloads
DEADLINE_S = 1800
# By Python, the requirements instead of `torch`. torch before 2.3 does not work with numpy 2.
TORCHS = {"3.9": "torch==2.1.0 'numpy<2'", "3.12": "torch", "3.13": "torch"}
OWN = "train.py"
LAUNCH = f"python -m ddpshim run --nproc 2 {OWN}"


# What other messages and help texts print, and does not train.
PRINTED = (
    ("docs", "^launch "),
    ("docs options", "DDPSHIM_RESUME"),
    ("docs MIGRATION", "wrap_parallel"),
    ("selftest --env", "^ +torch "),
    ("patch list", "^robomimic/"),
    (f"slurm {OWN}", "^#SBATCH"),
    (f"run --dry-run --nproc 2 {OWN}", "torch.distributed.run"),
)


class Step(NamedTuple):
    """A command, its exit code, and what its output contains, as regular expressions."""

    command: str
    code: int = 0
    says: tuple[str, ...] = ()


def first_screen() -> str:
    """Return the README's text before its first heading."""
    return (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]


def typed(wheel: Path, python: Path, torch: str) -> tuple[str, list[str], list[str]]:
    """Return what the first screen says to type, with the wheel, this Python and two ranks.

    First the command that makes an environment, then those that install, then those that run, each in their order.
    """
    lines = [
        line.partition("  #")[0].strip()
        for block, inline in re.findall(r"^```\n(.*?)^```$|`(python -m [^`]+)`", first_screen(), re.M | re.S)
        for line in (block or inline).splitlines()
        if "bootstrap.py" not in block
    ]
    text = "\n".join(lines)
    for written, meant in (
        ("python3 -m venv", f"{python} -m venv"),
        ("pip install .\n", f"pip install {wheel}\n"),
        ('".[', f'"{wheel}['),
        ("install torch ", f"install {torch} "),
    ):
        if written not in text:
            raise ValueError(f"the README's first screen has no {written!r}: tell evidence/newcomer.py what it has now")
        text = text.replace(written, meant)
    (venv,), pips, runs = (
        [line for line in text.splitlines() if re.search(kind, line)]
        for kind in ("-m venv", "^pip install", "^python -m (?!venv)")
    )
    # The environment for robomimic first: the user's own trainer then keeps its torch.
    return venv, sorted(pips, key=lambda line: line == f"pip install {wheel}"), runs


def mistakes(home: Path) -> Iterator[Step]:
    """Write the trainers with mistakes into a folder; yield the commands, and how each is answered."""
    for words, says in (
        (f"run {OWN} --nproc 2", "Put it first: --nproc N train.py"),
        (f"run --gpus 2 {OWN}", "did you mean --nproc"),
        (f"run --world-size 2 {OWN}", "did you mean --nproc"),
        ("run --nproc 2 trian.py", "trian.py does not exist"),
        ("doctor a b", "did you mean check"),
        (OWN, f"did you mean run {OWN}"),
        ("docs lunch", "did you mean launch"),
        ("report nowhere", "nowhere holds no records"),
        ("run --nproc 2 -m robomimic.scripts.train --config no.json", "no.json does not exist.*ddpshim example"),
    ):
        yield Step(f"python -m ddpshim {words}", 2, (says,))
    own = (home / OWN).read_text(encoding="utf-8")
    after = (ROOT / "examples" / "train_after.py").read_text(encoding="utf-8")
    for name, text, old, new, says in (
        ("misspelt", after, "wrap_parallel(", "wrap_paralel(", r"no attribute 'wrap_paralel'.*[Dd]id you mean"),
        ("no_number", after, "batch_size=100", 'batch_size="100"', "batch_size should be a positive integer"),
        ("one_sample", after, "batch_size=100", "batch_size=1", "Global batch 1 is smaller than 2 ranks"),
        ("broken", own, "loss.backward()", "loss.backwards()", "no attribute 'backwards'"),
    ):
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is not once in the trainer of {name}.py: tell evidence/newcomer.py")
        (home / f"{name}.py").write_text(text.replace(old, new), encoding="utf-8")
        line = 1 + text[: text.index(old)].count("\n")
        yield Step(LAUNCH.replace(OWN, f"{name}.py"), 1, (rf'{name}\.py", line {line}, in main', says))


def promised(command: str) -> tuple[str, ...]:
    """Return what a command of README's first screen prints."""
    if OWN in command:
        return ("^best: loss",)
    if "robomimic.scripts.train" in command:
        return ("^Train Epoch 20$", '"Loss": ')
    return (r"^wrote lift_bc\.json",) if command.endswith(" example") else (r"\bdigits\b",)


def visit(wheel: Path, python: str) -> Iterator[tuple[str, list[str]]]:
    """Take all steps with a Python; yield a line about each, with its seconds, and its faults."""
    interpreter = find(python)
    if interpreter is None:
        yield f"Python {python}", [f"no python{python} on this machine"]
        return
    with tempfile.TemporaryDirectory(prefix=f"newcomer-{python}-") as folder:
        home = Path(folder)
        (home / OWN).write_bytes((ROOT / "examples" / "any_trainer" / "train_dataparallel.py").read_bytes())
        venv, pips, runs = typed(wheel, interpreter, TORCHS[python])
        asks = "import ddpshim, torch; print(torch.__version__, ddpshim.__file__)"
        clock_s, losses = 0.0, {}
        for step in (
            *(Step(command) for command in (venv.partition(" && ")[0], *pips)),
            Step(f"python -c '{asks}'", 0, (re.escape(f"{home / 'env'}"),)),
            Step(f"python {OWN}", 0, ("^best: loss",)),
            *(Step(command, 0, promised(command)) for command in runs),
            Step("python -m ddpshim report lift_bc/lift_bc", 0, ("plotly is not installed",)),  # as each run's end says
            *(Step(f"python -m ddpshim {words}", 0, (says,)) for words, says in PRINTED),
            *mistakes(home),
        ):
            began = time.monotonic()
            code, said = type_in(step.command, home)
            took_s = time.monotonic() - began
            clock_s += took_s * (not step.command.startswith("pip "))
            faults = [f"exit code {code}, not {step.code}"] * (code != step.code)
            faults += [f"does not say: {words}" for words in step.says if not re.search(words, said, re.M | re.S)]
            if step.code == 1 and said.count("Traceback (most recent") != 1:
                faults.append("its traceback is not there once")
            if step.says == ("^best: loss",):
                losses[step.command] = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
                off = [abs(a - b) for a, b in zip(*(list(losses.values()) * 2)[:2])]
                faults += [f"losses of one process and of ranks: {losses}"] * (len(off) != 9 or max(off) > 2e-6)
            yield f"{took_s:6.1f} s  {step.command}".replace(f"{wheel.parent}/", ""), faults and [*faults, said[-4000:]]
            if "run" in step.command and "robomimic" in step.command and step.code == 0:
                models = [*home.glob("lift_bc/lift_bc/*/models/model_epoch_20.pth")]
                found = [float(loss) for loss in re.findall(r'^ +"Loss": (\S+?),?$', said, re.MULTILINE)]
                faults = [] if len(found) == 20 and found[-1] < found[0] / 2 else [f"losses of 20 epochs: {found}"]
                faults += ["no model_epoch_20.pth"] * (not models) + ["too long"] * (clock_s > MOST_S)
                yield f"{clock_s:6.1f} s  without the downloads, a policy is trained (at most {MOST_S} s)", faults


def type_in(command: str, home: Path) -> tuple[int, str]:
    """Run a command in the new environment, as in a terminal without input; return its exit code and its output."""
    path = f"{home / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "DDPSHIM"))}
    ran = subprocess.run(
        ["bash", "-c", command],
        cwd=home,
        env={**kept, "HOME": str(home), "PYTHONUNBUFFERED": "1", "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return ran.returncode, ran.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", choices=TORCHS, action="append", help="only this one (3.9 and 3.12)")
    parser.add_argument("--wheel", type=Path, help="instead of building one")
    arguments = parser.parse_args()
    num_missed = 0
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        wheel = arguments.wheel and arguments.wheel.resolve()
        if wheel is None:
            command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            (wheel,) = Path(folder).glob("*.whl")
        for python in arguments.python or ("3.9", "3.12"):
            print(f"Python {python}:", flush=True)
            for line, faults in visit(wheel, python):
                print(f"{'NO ' if faults else 'yes'} {line}", *faults, sep="\n    ", flush=True)
                num_missed += bool(faults)
    print(f"{num_missed} steps missed" if num_missed else "every step was answered as promised")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
