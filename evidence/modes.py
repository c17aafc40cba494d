"""Trains in every pair of modes, on ranks and in one process: `python -m evidence.modes --write evidence/modes.md`.

A row is one training (evidence/modes_train.py) with a value of each factor. Rows are chosen so that every two values of
two factors meet in one of them. A new mode is a value or a line of FACTORS, with its code in the trainer.
"""

from __future__ import annotations

import math
import random
import re
import shutil
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from evidence import compare, pages
from tests.preloaded import environment, preloaded, start_afresh

FACTORS = {  # the first value is the plainest
    "door": ["run", "global"],
    "ranks": ["2", "3"],
    "batch": ["12", "7"],  # of 38 samples
    "drop_last": ["no", "yes"],
    "workers": ["0", "2", "persistent"],
    "collate": ["no", "mapping", "noise"],
    "sampler": ["shuffle", "order", "weighted", "subset", "generator", "batches", "stream"],
    "draws": ["no", "torch", "numpy", "python", "own", "visits"],  # in the dataset; own: a generator of the file
    "draws_by": ["no", "sample"],  # DDPSHIM_DRAWS, compared with one rank of the same door
    "noise": ["no", "torch", "numpy"],  # in a step
    "net": ["mlp", "batchnorm", "lstm", "transformer", "two"],
    "loss": ["mean", "masked", "contrastive"],
    "optimizer": ["sgd", "adamw", "groups", "rmsprop", "adagrad", "lbfgs"],
    "schedule": ["no", "cosine", "plateau"],
    "precision": ["float64", "float32", "bf16"],
    "accumulate": ["no", "batches", "parts"],
    "clip": ["no", "norm", "value"],
    "ema": ["no", "copy", "averaged", "shadow", "swa"],
    "save": ["no", "epochs", "best"],
    "resume": ["no", "flag", "flag_other", "signal", "signal_other"],  # other: 3 ranks go on where 2 were
    "exact": ["no", "6"],
    "logging": ["read", "epoch", "print", "file", "append"],
    "evaluate": ["no", "loader", "rollout"],
    "recompute": ["no", "reentrant", "not_reentrant"],
    "tool": ["no", "check", "certificate"],
}
OF_THE_JOB = ("door", "ranks", "exact", "tool", "draws_by")  # which the trainer does not know
# What does not exist together, or what the docs name as different.
FORBIDDEN = {
    "door=run resume=signal|signal_other": "needs Resumable",
    "drop_last=yes sampler=batches": "a batch sampler decides that",
    "optimizer=lbfgs accumulate=batches|parts": "its closure computes",
    "optimizer=lbfgs clip=norm|value": "its closure computes",
    "optimizer=lbfgs precision=bf16": "it divides by differences of gradients",
    "sampler=subset drop_last=yes accumulate=batches resume=signal|signal_other": "too few steps are left to stop",
    "tool=check|certificate resume=flag|flag_other|signal|signal_other": "they start the program once",
    "tool=check exact=6": "it compares with plain torch",
    "tool=certificate exact=no": "a certificate has it",
    "exact=6 resume=flag_other|signal_other": "compared with one rank",
    "workers=persistent resume=signal|signal_other draws=torch|numpy|python": "drawn again (docs/same_experiment.md)",
    "workers=persistent resume=signal|signal_other collate=noise": "the same",
    "draws=own|visits resume=signal|signal_other": "what a dataset remembers is not saved",
}
TOLERANCE, NUDGES, DEADLINE_S = {"float64": 1e-9, "float32": 1e-6, "bf16": 1e-3}, 30, 120.0
FAULTS = ("different", "refused", "crashed", "hung")
HERE = Path(__file__).parent
START = "<!-- what follows is written by python -m evidence.modes --write evidence/modes.md -->"
Row = dict[str, str]


def conditions(where: str) -> dict[str, list[str]]:
    return {name: values.split("|") for name, _, values in (word.partition("=") for word in where.split())}


IMPOSSIBLE = [conditions(where) for where in FORBIDDEN]


def is_possible(row: Row) -> bool:
    """Return whether nothing forbids `row`, which may be a part of one."""
    return not any(all(row.get(name) in values for name, values in where.items()) for where in IMPOSSIBLE)


def covering_rows(seed: int = 0, num_tries: int = 20) -> list[Row]:
    """Return rows in which every two values meet that can: each row is the best of some that are drawn."""
    draw, items = random.Random(seed), [(name, value) for name, values in FACTORS.items() for value in values]
    missing = {item: {one for one in items if one[0] != item[0] and is_possible(dict([item, one]))} for item in items}
    rows: list[Row] = []
    while any(missing.values()):
        needed = draw.choice([item for item in items if missing[item]])
        needed, tries = (needed, draw.choice(sorted(missing[needed]))), []
        for _ in range(num_tries):
            row = dict(needed)
            for name in draw.sample([*FACTORS], len(FACTORS)):
                possible = [value for value in FACTORS[name] if name not in row and is_possible({**row, name: value})]
                gains = [len(missing[name, value] & {*row.items()}) for value in possible]
                best = [value for value, gain in zip(possible, gains) if gain == max(gains)]
                row |= {name: draw.choice(best)} if best else {}
            if len(row) == len(FACTORS):
                tries.append((sum(len(missing[item] & {*row.items()}) for item in row.items()), row))
        if tries:
            row = max(tries, key=lambda each: each[0])[1]
            rows.append({name: row[name] for name in FACTORS})
        for item in row.items() if tries else needed:  # three conditions together may exclude a pair
            missing[item] -= {*(row.items() if tries else needed)}
    return rows


def words_of(row: Row) -> str:
    """Return the door, the ranks, and every value that is not the plainest."""
    kept = {name: value for name, value in row.items() if name not in ("door", "ranks") and value != FACTORS[name][0]}
    return " ".join([row["door"], row["ranks"], *(f"{name}={value}" for name, value in kept.items())])


class Outcome(NamedTuple):
    kind: str  # equal, rounding, or one of FAULTS
    said: str


class Ended(Exception):
    """A process ended otherwise than it should: with this exit code and output."""


class Run:
    """A training of `row` in `folder`, in a plain process if `num_ranks` is 0."""

    def __init__(self, folder: Path, row: Row, num_ranks: int, *also: str) -> None:
        folder.mkdir()
        self.folder, self.row, self.num_ranks = folder, row, num_ranks
        is_edited = bool(num_ranks) and row["door"] != "run"
        for name in ("modes_train.py", "modes_doors.py")[: 1 + is_edited]:
            shutil.copy(HERE / name, folder)
        words = [f"{name}={value}" for name, value in row.items() if name not in OF_THE_JOB]
        self.program = ["modes_doors.py" if is_edited else "modes_train.py", *words, *also]

    def start(self, *command: str, code: int = 0) -> str:
        environ = {**environment(), "DDPSHIM_ROWS": "all"}
        if self.num_ranks and self.row["exact"] != "no":
            environ["DDPSHIM_EXACT"] = self.row["exact"]
        if self.num_ranks and self.row["draws_by"] != "no":
            environ["DDPSHIM_DRAWS"] = self.row["draws_by"]
        found, said = start_afresh(command, environ, self.folder, DEADLINE_S)
        if found != code:
            raise Ended(found, said)
        return said

    def train(self, *options: str) -> dict[str, torch.Tensor]:
        """Return what the training saved, logged and printed."""
        kind, _, other = self.row["resume"].partition("_")
        said, num_ranks = "", self.num_ranks
        for which in ["first", "second"] if kind == "flag" or (kind == "signal" and num_ranks) else ["only"]:
            launch = ["-m", "ddpshim", "run", "--nproc", str(num_ranks), *options] if num_ranks else []
            code = 75 if (kind, which) == ("signal", "first") else 0
            said += self.start(*launch, *self.program, f"start={which}", code=code)
            num_ranks = 5 - num_ranks if other and num_ranks else num_ranks
        logs = [file.read_text() for file in self.folder.glob("out/*log*")]
        printed = [float(number) for text in [said, *logs] for number in re.findall(r"^(?:log )?(\S+)$", text, re.M)]
        result = {**torch.load(self.folder / "result.pth"), "printed": torch.tensor(printed, dtype=torch.float64)}
        for file in sorted(self.folder.glob("out/[be]*.pth")):
            result |= {f"{file.stem}.{name}": value for name, value in torch.load(file)["net"].items()}
        return result

    def ask_tool(self) -> None:
        if self.row["tool"] == "check":
            self.start("-m", "ddpshim", "check", "--nproc", self.row["ranks"], *self.program)
        elif self.row["tool"] == "certificate":
            self.start("-m", "ddpshim", "check", "--certificate", "run.json", "--nproc", "1", "--steps", "0:2")


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest difference, as a part of the tensor's largest value if that is above 1, and where it is."""
    if one.keys() != other.keys():
        return math.inf, f"names: {sorted(one.keys() ^ other.keys())[:4]}"
    found = {}
    for name, tensor in one.items():
        scale = max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0
        found[name] = compare.difference(tensor, other[name]) / scale
    found["printed"] *= found["printed"] > 2e-6  # seven digits
    return max((by, name) for name, by in found.items())


def judge(row: Row, folder: Path) -> Outcome:
    """Run a row in an empty `folder`, and return how the ranks' training compares with that of one process."""
    num, plainly = 0, row
    if row["draws_by"] == "sample":  # which a program alone does not do
        num, plainly = 1, {**row, "resume": "flag" if "flag" in row["resume"] else "no", "exact": "no"}
    plain = Run(folder / "plain", plainly, num).train()
    try:
        ranks = Run(folder / "ranks", row, int(row["ranks"]))
        certify = ["--certify", "run.json", "--certify-every", "2"] if row["tool"] == "certificate" else []
        found = ranks.train(*certify)
        (Run(folder / "checked", row, int(row["ranks"])) if row["tool"] == "check" else ranks).ask_tool()
        if row["exact"] != "no":
            by, where = apart(Run(folder / "alone", row, 1).train(), found)
            if by:
                return Outcome("different", f"exact, from one rank: {where} by {by:.0e}")
    except Ended as ended:
        return why(*ended.args)
    by, where = apart(plain, found)
    if by <= TOLERANCE[row["precision"]]:
        return Outcome("equal", f"{by:.0e}")
    nudge, _ = apart(plain, Run(folder / "nudged", plainly, num, "nudge=yes").train())
    is_rounding = compare.is_rounding(by, nudge, NUDGES) and row["precision"] != "float64"
    return Outcome("rounding" if is_rounding else "different", f"{where} by {by:.0e}; one process, nudged: {nudge:.0e}")


def why(code: int, said: str) -> Outcome:
    """Return what the end of a job is: an answer of `check`, a refusal, or a crash."""
    if code in (0, 124):
        return Outcome("hung" if code else "different", said[-1500:] if code else "the signal did not end it with 75")
    for start in ("the same experiment: no", "not verified"):
        if start in said:
            return Outcome("different", said[said.index(start) :][:600])
    errors = re.findall(r"^.*?((?:Checkpoint|Data|Launch|Options|Sync|World)Error: .*)", said, re.MULTILINE)
    if not errors:
        return Outcome("crashed", f"exit code {code}: {said[-1500:]}")
    return Outcome("refused", errors[-1])


def main() -> None:
    parser = pages.parser(__doc__)
    parser.add_argument("--only", help="rows, by commas: 3,17; or the values of one: door=global,net=lstm")
    parser.add_argument("--seed", type=int, default=0, help="of the rows")
    parser.add_argument("--jobs", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.only and "=" in chosen.only:
        plainest = {name: values[0] for name, values in FACTORS.items()}
        rows = {0: {**plainest, **dict(word.split("=") for word in chosen.only.split(","))}}
    else:
        rows = dict(enumerate(covering_rows(chosen.seed)))
        numbers = map(int, chosen.only.split(",")) if chosen.only else rows
        rows = {number: rows[number] for number in numbers if rows[number]["ranks"] in chosen.ranks}
    preloaded()  # before threads need it
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(chosen.jobs) as pool:

        def run(number: int) -> tuple[int, Outcome]:
            folder = Path(made, str(number))
            folder.mkdir(parents=True)
            return number, judge(rows[number], folder)

        kinds: Counter[str] = Counter()

        def cells(number: int, outcome: Outcome) -> tuple[str, ...]:
            kinds[outcome.kind] += 1
            kind = f"**{outcome.kind}**" if outcome.kind in FAULTS else outcome.kind
            said = outcome.said if chosen.only else " ".join(outcome.said.replace("|", "").split())[-240:]
            return str(number), words_of(rows[number]), f"{kind}: {said}"

        lines = pages.table(("row", "modes", "ranks"), (cells(*done) for done in pool.map(run, rows)))
    counts = ", ".join(f"{num} {kind}" for kind, num in kinds.most_common())
    pages.finish([f"{len(rows)} rows: {counts}.", "", *lines], chosen.write, START, "")


if __name__ == "__main__":
    main()
