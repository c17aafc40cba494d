"""Lists the files of ddpshim that small trainers load, and their lines: `python -m tests.loaded`.

Three processes: examples/train_shares.py without a launcher; the same as one of two launched ranks; and a rank of
`python -m ddpshim run`, whose program has no line of ddpshim.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.preloaded import FORGETS, environment, start_afresh

ROOT = Path(__file__).resolve().parent.parent
AFTER = ROOT / "examples" / "train_shares.py"
UNEDITED = ROOT / "examples" / "any_trainer" / "train_dataparallel.py"

# Runs a trainer; then writes the file of each module of ddpshim that it has loaded.
PROGRAM = """
import os, runpy, sys

trainer, listing = sys.argv[1:]
file = open(f"{listing}.{os.environ.get('RANK', 0)}", "w")  # before `run` joins the job: then one rank writes
sys.argv = [trainer]
runpy.run_path(trainer, run_name="__main__")
ours = [(name, module) for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == "ddpshim"]
file.writelines(f"{name} {module.__file__}\\n" for name, module in ours)
"""


def loaded(kind: str) -> dict[str, int]:
    """Return the lines of each module that a process has loaded at its end: "plain", "launched" or "run".

    Of several ranks, the one that has loaded most counts.
    """
    with tempfile.TemporaryDirectory() as folder:  # the trainers write files
        program, listing = Path(folder, "program.py"), Path(folder, "listing")
        program.write_text(PROGRAM)
        rank = [str(program), str(UNEDITED if kind == "run" else AFTER), str(listing)]
        starts = {
            "plain": rank,
            "launched": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *rank],
            "run": ["-m", "ddpshim", "run", "--nproc", "2", *rank],
        }
        environ = {**environment(), "OMP_NUM_THREADS": "1", FORGETS: "ddpshim"}
        code, said = start_afresh(starts[kind], environ, Path(folder), 240)
        assert code == 0, said
        of_ranks = [file.read_text().splitlines() for file in Path(folder).glob("listing.*")]
    found = [{name: _num_lines(Path(file)) for name, file in map(str.split, lines)} for lines in of_ranks]
    return max(found, key=lambda lines: sum(lines.values()))


def in_package() -> int:
    return sum(_num_lines(file) for file in (ROOT / "ddpshim").rglob("*.py"))


def _num_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def main() -> None:
    for kind in ("plain", "launched", "run"):
        found = loaded(kind)
        for name, lines in sorted(found.items(), key=lambda item: -item[1]):
            print(f"{lines:5d}  {name}")
        print(f"{sum(found.values()):5d}  lines in {len(found)} modules: {kind}\n")
    print(f"{in_package():5d}  lines in the package")


if __name__ == "__main__":
    main()
