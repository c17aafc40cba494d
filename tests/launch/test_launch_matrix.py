"""Every way to launch trains the same: a few exact steps (tests/matrix_train.py), by real launchers where there are.

Emulated by its variables: a launched world of one. It is forked (tests/preloaded.py), and so are torchrun's own agents
and their ranks. SLURM is in test_slurm.py.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.preloaded import environment, preloaded, start_afresh
from tests.preloaded_commands import patience

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "matrix_train.py")
DEADLINE_S = 240
ENVIRON = {**environment(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
Reports = list[dict[str, Any]]


def _reports(folder: Path) -> Reports:
    found = [json.loads(file.read_text()) for file in folder.glob("rank_*.json")]
    return sorted(found, key=lambda report: report["rank"])


def agents(folder: Path, launcher: str, *options: str, num_nodes: int = 1) -> Reports:
    """What the ranks wrote that the agents of `launcher`, one on each emulated node, forked: see tests/preloaded.py."""
    meet = [f"--nnodes={num_nodes}", "--master-addr=127.0.0.1", f"--master-port={ranks.free_port()}"]
    places = [[*meet, f"--node-rank={number}"] for number in range(num_nodes)] if num_nodes > 1 else [[]]
    commands = [([*launcher.split(), *place, *options, SCRIPT, str(folder)], ENVIRON) for place in places]
    job = preloaded().start(commands, folder)
    assert job.wait(DEADLINE_S) == 0, (folder / "output.txt").read_text()
    return _reports(folder)


def forked(folder: Path, environ: dict[str, str]) -> Reports:
    """What a process in this environment wrote."""
    code, said = start_afresh([SCRIPT, str(folder)], {**ENVIRON, **environ}, folder, DEADLINE_S)
    assert code == 0, said
    return _reports(folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a launched world of one says: the yardstick."""
    (report,) = forked(tmp_path_factory.mktemp("one"), {"RANK": "0", "WORLD_SIZE": "1"})
    assert report["launcher"] == "torchrun"
    assert report["loss"] == 2.541748046875
    assert sorted(report["seen"]) == list(range(32))
    return report


def check(reports: Reports, one: dict[str, Any], num_nodes: int, ranks_per_node: int, launcher: str) -> None:
    """All ranks are there, each in its place with its share of the samples, and all hold what one process holds."""
    places = [(report["node_rank"], report["local_rank"]) for report in reports]
    assert places == list(itertools.product(range(num_nodes), range(ranks_per_node)))
    size = num_nodes * ranks_per_node
    for number, report in enumerate(reports):
        assert (report["rank"], report["world_size"], report["launcher"]) == (number, size, launcher)
        assert report["seen"] == [*range(32)][number::size]
        assert (report["loss"], report["weight"]) == (one["loss"], one["weight"])


# An sbatch script or a shell in an allocation, from which nobody started several tasks.
ALLOCATION = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[1-2]"}
ALONE = (
    "ddpshim: SLURM variables (SLURM_JOB_ID='42', SLURM_NTASKS='4'), but not of an srun with several tasks: this is a "
    "single process\n"
)


@pytest.mark.parametrize(("environ", "said"), [({}, ""), (ALLOCATION, ALONE)])
def test_one_process(environ: dict[str, str], said: str, tmp_path: Path, one: dict[str, Any]) -> None:
    check(forked(tmp_path, environ), one, 1, 1, "none")
    assert (tmp_path / "output.txt").read_text() == said


def test_torchrun_on_two_nodes(tmp_path: Path, one: dict[str, Any]) -> None:
    reports = agents(tmp_path, "torch.distributed.run", "--nproc_per_node=2", num_nodes=2)
    check(reports, one, 2, 2, "torchrun")
    assert "ddpshim: 4 ranks on 2 machines, CPU (torchrun, gloo)" in (tmp_path / "output.txt").read_text()


def test_run_on_two_nodes(tmp_path: Path, one: dict[str, Any]) -> None:
    check(agents(tmp_path, "ddpshim run", "--nproc=1", "--log-dir=logs", num_nodes=2), one, 2, 1, "torchrun")
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (Debian: apt-get install openmpi-bin)")
def test_mpirun(tmp_path: Path, one: dict[str, Any]) -> None:
    options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2")
    command = ["mpirun", *options, sys.executable, SCRIPT, str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, env=ENVIRON, timeout=patience(DEADLINE_S), check=True)
    check(_reports(tmp_path), one, 1, 2, "openmpi")
