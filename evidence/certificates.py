"""Tampers with certified runs and repeats honest ones: `python -m evidence.certificates` writes certificates.md.

Each planted change must be named with its cause; each honest repetition, on 1, 2 or 4 ranks, must be verified. A run
that was killed and resumed on another number of ranks is among them. Takes fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ddpshim.tools import certificate
from ddpshim.tools.certificate import sha256_of
from evidence import pages
from evidence.results import ran

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("certificates.md")
START = "<!-- what follows is written by python -m evidence.certificates --write -->"
PROGRAMS = Path(__file__).with_name("certified")
EVERY, EXACT, DEADLINE_S = 10, 4, 300
NUM_HONEST = 50


class Tamper(NamedTuple):
    """`change` gets the folder of a certified run and changes it; `cause` must be in what `check` says."""

    name: str
    change: Callable[[Path], Any]
    cause: str
    arguments: tuple[str, ...] = ()  # of the check
    certificate: str = "run.json"


def make(folder: Path) -> None:
    """Write the programs and their data, and certify a run of each; `resuming.py` is killed and resumed."""
    import numpy as np

    for file in PROGRAMS.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "site").mkdir()
    (folder / "site" / "library.py").write_text("SCALE = 1.0\n")
    drawn = np.random.default_rng(0)
    x = drawn.standard_normal((250, 6)).astype("f4")
    np.savez(folder / "data.npz", x=x, y=np.sin(x.sum(1, keepdims=True)))
    certify = ("run", "--certify-every", str(EVERY), "--certify")
    ddpshim(folder, *certify, "run.json", "--nproc", "2", "train.py")
    ddpshim(folder, *certify, "resumed.json", "--nproc", "2", "resuming.py", STOP_AT="23", code=75)
    ddpshim(folder, *certify, "resumed.json", "--nproc", "4", "resuming.py", DDPSHIM_RESUME="always")


def ddpshim(folder: Path, *arguments: str, code: int = 0, **environ: str) -> str:
    """Run a command of ddpshim in `folder`, and return its output. Raises RuntimeError if it ends otherwise."""
    given = {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}", "DDPSHIM_EXACT": str(EXACT), **environ}
    return ran(["-m", "ddpshim", *arguments], folder, DEADLINE_S, given, code)


def edited(change: Callable[[dict[str, Any]], Any], is_sealed: bool, name: str = "run.json") -> Callable[[Path], None]:
    """Return a change of a certificate, with its seal made anew if `is_sealed`."""

    def edit(folder: Path) -> None:
        path = folder / name
        found = json.loads(path.read_text())
        change(found)
        if is_sealed:
            certificate.write(found, path)
        else:
            path.write_text(json.dumps(found))

    return edit


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Return a change of a text file."""

    def replace(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text, (name, old)
        (folder / name).write_text(text.replace(old, new))

    return replace


def sample(key: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        import numpy as np

        with np.load(folder / "data.npz") as data:
            arrays = dict(data)
        if key == "order":
            arrays = {name: array[::-1] for name, array in arrays.items()}
        elif key == "fewer":
            arrays = {name: array[:-10] for name, array in arrays.items()}
        else:
            arrays[key][7] += 0.25
        np.savez(folder / "data.npz", **arrays)

    return change


def damaged(damage: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return a change of the newest checkpoint's bytes."""

    def change(folder: Path) -> None:
        path = max((folder / "resumed.checkpoints").iterdir())
        path.write_bytes(damage(path.read_bytes()))

    return change


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def forged_checkpoint(folder: Path) -> None:
    """Another run's checkpoint, with its hash in a certificate that is sealed anew."""
    import torch

    from ddpshim.checkpoint import progress_folder

    path = max((folder / "resumed.checkpoints").iterdir())
    content = progress_folder.read_plain(path, is_trusted=False)
    content["objects"]["net"]["0.weight"][0, 0] += 1e-3
    torch.save(progress_folder.plain_content(content, path, is_trusted=False), path)
    edited(lambda found: found["checkpoints"][-1].update(sha256=sha256_of(path)), True, "resumed.json")(folder)


def one_in(mark: int, field: str, place: int) -> Callable[[dict[str, Any]], None]:
    """Return a change of one value of a mark: by the last bit of a loss, by a digit of a hash."""

    def change(found: dict[str, Any]) -> None:
        value = found["marks"][mark][field]
        if field == "losses":
            value[place] = float(value[place]) + 2.0**-24
        else:
            digit = "0" if value[place] != "0" else "1"
            found["marks"][mark][field] = value[:place] + digit + value[place + 1 :]

    return change


def hidden(name: str, old: str, new: str) -> Callable[[Path], None]:
    """A change of the code that also the certificate has: only the repetition can tell."""

    def forge(folder: Path) -> None:
        replaced(name, old, new)(folder)
        code = {name: sha256_of(folder / name)}
        edited(lambda found: found["facts"]["code"].update(code), True)(folder)

    return forge


def tampers() -> Iterator[Tamper]:
    """Yield the planted changes: of the file, of the file with its seal made anew, of code, data and arguments."""
    was_edited = "was edited after it was written"
    facts: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
        ("seed", lambda f: f.update(seed=1)),
        ("exact", lambda f: f.update(exact=8)),
        ("number of ranks", lambda f: f.update(ranks=8)),
        ("an argument", lambda f: f["program"].append("--lr=1")),
        ("a package's version", lambda f: f["facts"]["packages"].update(torch="9")),
        ("a file of the code", lambda f: f["facts"]["code"].popitem()),
        ("a file of the data", lambda f: f["facts"]["data"].popitem()),
        ("hardware", lambda f: f["facts"]["environment"].update(CPU="other")),
        ("the end", lambda f: f.update(is_complete=False)),
    ]
    for name, change in facts:
        yield Tamper(f"edited: {name}", edited(change, False), was_edited)
    for field, place in (("losses", 3), ("weights", 5)):
        yield Tamper(f"edited: {field}", edited(one_in(3, field, place), False), was_edited)
    dropped, swapped = (lambda f: f["marks"].pop(2)), (lambda f: f["marks"].insert(1, f["marks"].pop(2)))
    yield Tamper("edited: a missing step", edited(dropped, False), "steps are missing")
    yield Tamper("edited: marks exchanged", edited(swapped, False), "steps are missing")
    yield Tamper("edited: a mark's step", edited(lambda f: f["marks"][1].update(step=21), False), "steps are missing")
    yield Tamper("edited: the seal", edited(lambda f: f.update(seal="0" * 64), False), was_edited)
    cleared = edited(lambda f: f["checkpoints"].clear(), False, "resumed.json")
    yield Tamper("edited: the checkpoint", cleared, was_edited, (), "resumed.json")
    yield Tamper("forged: a missing step", edited(dropped, True), "steps are missing")
    for field, place, where in (("losses", 4, "loss: "), ("weights", 3, "weights: "), ("weights", 40, "weights: ")):
        change = edited(one_in(1, field, place), True)
        yield Tamper(f"forged: {field} [{place}]", change, where, ("--steps", "10:20"))
    forged_seed = edited(lambda f: f["program"].extend(["--seed", "4"]), True)
    yield Tamper("forged: the seed", forged_seed, "loss: ", ("--steps", "0:10"))
    yield Tamper("forged: lr", edited(lambda f: f["program"].extend(["--lr", "0.02"]), True), "loss: ")
    of_code: tuple[tuple[str, str, str, str], ...] = (
        ("lr", "train.py", "lr=given.lr", "lr=1.01 * given.lr"),
        ("the network", "train.py", "nn.Tanh()", "nn.ReLU()"),
        ("dropout", "train.py", "Dropout(0.1)", "Dropout(0.11)"),
        ("the order of samples", "train.py", "shuffle=True", "shuffle=False"),
        ("the loss", "helper.py", "smooth_l1_loss(out, y)", "mse_loss(out, y)"),
        ("the loss, by a factor", "helper.py", "return F", "return 1.0001 * F"),
    )
    for name, file, old, new in of_code:
        yield Tamper(f"code: {name}", replaced(file, old, new), f"code: {file}", ("--steps", "0:10"))
    for name, file, old, new in of_code[:3]:
        change = hidden(file, old, new)
        yield Tamper(f"code, and its hash: {name}", change, "those of the certificate", ("--steps", "0:20"))
    library = replaced("site/library.py", "1.0", "1.5")
    yield Tamper("a library's line", library, "library", ("--steps", "0:10"))
    for key in ("x", "y", "order", "fewer"):
        yield Tamper(f"data: {key}", sample(key), "data: data.npz", ("--steps", "0:20"))
    yield Tamper("data: gone", lambda folder: (folder / "data.npz").unlink(), "data: data.npz is in the certificate")
    for words in (("--lr", "0.011"), ("--seed", "4"), ("--batch", "12")):
        arguments = ("--steps", "0:10", "train.py", *words)
        yield Tamper(f"arguments: {words[0]}", lambda _: None, "arguments: ", arguments)
    for name, damage in (("a bit", flipped), ("a part", lambda content: content[:-100])):
        yield Tamper(f"checkpoint: {name}", damaged(damage), "checkpoint: ", certificate="resumed.json")
    yield Tamper("checkpoint: one weight, forged", forged_checkpoint, "loss: ", ("--steps", "60:70"), "resumed.json")


def tried(tamper: Tamper, made: Path) -> str:
    """Return what `check` said of a tampered copy of `made`, as long as it names the cause; else raise RuntimeError."""
    with copied(made) as folder:
        tamper.change(folder)
        code = 2 if tamper.name.startswith(("edited", "checkpoint: a", "forged: a missing", "data: gone")) else 1
        said = ddpshim(folder, "check", "--certificate", tamper.certificate, *tamper.arguments, code=code)
    if tamper.cause not in said:
        raise RuntimeError(f"{tamper.name}: {tamper.cause!r} is not in what was said: {said}")
    lines = [line.strip() for line in said.splitlines() if tamper.cause in line]
    return lines[-1]


@contextlib.contextmanager
def copied(made: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        shutil.copytree(made, folder, ignore=shutil.ignore_patterns("ddpshim-logs", "out", "progress*"))
        yield folder


def honest(number: int) -> tuple[str, ...]:
    """Return the arguments of an honest check: both runs, 1, 2 and 4 ranks, all stretches."""
    first = 10 * (number % 6)
    certificate = ("run.json", "resumed.json")[number // 3 % 2]
    return ("--certificate", certificate, "--nproc", str((1, 2, 4)[number % 3]), "--steps", f"{first}:{first + 10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--honest", type=int, default=NUM_HONEST, help="honest repetitions")
    arguments = parser.parse_args()
    rows, wrong = [], 0
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        make(made)
        for tamper in tampers():
            try:
                said = tried(tamper, made)
            except RuntimeError as error:
                said, wrong = f"**{error}**", wrong + 1
            rows.append((tamper.name, said.replace(str(made), "").replace("|", "")[:160]))
            print(*rows[-1], sep=": ", flush=True)
        num_verified = 0
        for number in range(arguments.honest):
            with copied(made) as folder:
                try:
                    num_verified += "verified: steps" in ddpshim(folder, "check", *honest(number))
                except RuntimeError as error:
                    print(error, flush=True)
    counts = f"{len(rows) - wrong} of {len(rows)} planted changes are named with their cause, and {num_verified} of "
    counts += f"{arguments.honest} honest repetitions on 1, 2 and 4 ranks are verified."
    print(counts)
    if arguments.write:
        lines = [counts, "", *pages.table(("planted", "the line that names it"), rows, prints=False), ""]
        pages.fill(PAGE, START, "\n".join(lines))
    sys.exit(bool(wrong) or num_verified < arguments.honest)


if __name__ == "__main__":
    main()
