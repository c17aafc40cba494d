"""Compares programs in one process with several ranks that share one GPU: `python -m evidence.one_gpu`.

The ranks communicate through gloo (or DDPSHIM_BACKEND), because nccl refuses to share before 2.30. So this tests
kernels, draws, dtypes and memory of a GPU, but not speed. The programs are those of tests/one_process. `--exact`
compares bits on 1, 2 and 4 ranks instead. It takes three minutes on 16 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

from evidence import pages
from tests.one_process.compare import compare

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 400
ON_GPU = {"gpus": (), "idioms": ("--device", "cuda"), "hostile": ("--device", "cuda"), "layouts": ("--device", "cuda")}


def run(name: str, arm: str, options: Iterable[str], num_ranks: int, exact: Optional[int], folder: Path) -> Any:
    """Run all programs of a file on `num_ranks` ranks (0: in one process), and return their results."""
    environ = {"DDPSHIM_BACKEND": "gloo", **os.environ, "DDPSHIM_ROWS": "all"}
    environ |= {"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if exact is not None:
        environ["DDPSHIM_EXACT"] = str(exact)
    launched = ["-m", "ddpshim", "run", "--no-logs", "--nproc", str(num_ranks)] if num_ranks else []
    own = folder / f"{name}_{arm}"
    command = [sys.executable, *launched, "-m", f"tests.one_process.{name}", str(own), *ON_GPU[name], *options]
    with (folder / f"{name}_{arm}.txt").open("w") as said:
        try:
            subprocess.run(command, env=environ, cwd=folder, stdout=said, stderr=said, timeout=DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}, {arm}: not finished within {DEADLINE_S} s", flush=True)
    results = own / "results.json"
    return json.loads(results.read_text()) if results.exists() else {}


def rounding(names: list[str], num_ranks: int, folder: Path) -> dict[str, dict[str, str]]:
    """Return the verdict of each program: one process, the same with a nudge of the last bit, and ranks."""
    found = {}
    with ThreadPoolExecutor() as pool:
        plain = dict(zip(names, pool.map(lambda name: run(name, "plain", (), 0, None, folder), names)))
        # A rank whose program caught an error takes part in no further backward pass.
        only = {name: ("--only", ",".join(of for of, one in plain[name].items() if not one["error"])) for name in names}
        nudged = {name: pool.submit(run, name, "nudged", (*only[name], "--nudge"), 0, None, folder) for name in names}
        ranks = {name: pool.submit(run, name, "ranks", only[name], num_ranks, None, folder) for name in names}
    for name in names:
        of_plain = {of: one for of, one in plain[name].items() if not one["error"]}
        found[name] = compare(of_plain, ranks[name].result(), nudged[name].result())
    return found


def bits(names: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """Return, for each program with exact=4, whether 1, 2 and 4 ranks have the same bits."""
    with ThreadPoolExecutor() as pool:
        runs = {
            (name, num): pool.submit(run, name, f"exact_{num}", (), num, 4, folder)
            for name in names
            for num in (1, 2, 4)
        }
    found = {}
    for name in names:
        one, *others = (runs[name, num].result() for num in (1, 2, 4))
        found[name] = {
            of: "equal" if all(repr(other.get(of)) == repr(one[of]) for other in others) else "other bits" for of in one
        }
    return found


def rows(what: str, found: dict[str, dict[str, str]]) -> Iterator[tuple[str, ...]]:
    for name, verdicts in found.items():
        others = "; ".join(f"{of}: {verdict[:200]}" for of, verdict in verdicts.items() if verdict != "equal")
        yield name, what, f"{[*verdicts.values()].count('equal')} of {len(verdicts)}", others.replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(ON_GPU), help="files of programs")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--nproc", type=int, default=3, help="ranks")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own).resolve()
        found = bits(given.only, folder) if given.exact else rounding(given.only, given.nproc, folder)
        what = "exact=4 on 1, 2, 4 ranks" if given.exact else f"{given.nproc} ranks"
        print("\n".join(pages.table(("programs", "what", "equal", "others"), rows(what, found), prints=False)))


if __name__ == "__main__":
    main()
