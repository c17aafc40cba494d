"""Lists the files of ddpshim that small trainers load, and their lines: `python -m tests.loaded`.

Three processes: examples/train_shares.py without a launcher; the same as one of two launched ranks; and a rank of
`python -m ddpshim run`, whose program has no line of ddpshim.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.preloaded_commands import python

ROOT = Path(__file__).resolve().parent.parent
AFTER = ROOT / "examples" / "train_shares.py"
UNEDITED = ROOT / "examples" / "any_trainer" / "train_dataparallel.py"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

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
        environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environ.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        python(*starts[kind], environ=environ, cwd=folder)
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
