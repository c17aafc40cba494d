"""The sbatch script: its text, and that it runs, under an srun and an scontrol that are scripts of this file."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

import ddpshim.__main__ as command_line
from ddpshim.errors import LaunchError
from ddpshim.launch.slurm import batch_script
from tests.preloaded import preloaded
from tests.preloaded_commands import patience

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120
Starter = Callable[[str], "Batch"]

# Starts the tasks of every node on this machine, as srun would on its own; ends with the highest exit code, as srun.
SRUN = """#!/usr/bin/env python
import os, subprocess, sys
nodes, per_node = int(os.environ["STUB_NODES"]), int(os.environ["STUB_TASKS_PER_NODE"])
command = sys.argv[1:]
while command[0].startswith("--"):
    print("srun option", command.pop(0), flush=True)
tasks = []
for number in range(nodes * per_node):
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": nodes * per_node,
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_PROCID": number,
        "SLURM_LOCALID": number % per_node,
        "SLURM_NODEID": number // per_node,
    }
    environ = {**os.environ, **{name: str(value) for name, value in step.items()}}
    tasks.append(subprocess.Popen(command, env=environ))
with open("tasks.part", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
os.rename("tasks.part", "tasks")
sys.exit(max(task.wait() for task in tasks))
"""

# What a trainer does when it is told to leave, without the seconds of a real one.
TRAINER = """
import os, pathlib, signal, sys, time
from ddpshim.process.launch_env import read_launch_env
env = read_launch_env(os.environ)
def leave(signum, frame):
    print(f"rank {env.rank} of {env.world_size} saved on {signal.Signals(signum).name}", flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, leave)
pathlib.Path(f"ready_{env.rank}").touch()
if sys.argv[1:] == ["--wait", "a b"]:
    while True:
        time.sleep(0.02)  # not `signal.pause`: a signal that comes just before it would not be heard
sys.exit(int(sys.argv[1]) if env.rank == 1 else 0)
"""


class Batch:
    """An sbatch script that runs in `folder`, in a shell of its own, as SLURM's first node would run it."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        (folder / "job.sh").write_text(script)
        (folder / "train.py").write_text(TRAINER)
        (folder / "bin").mkdir()
        for name, text in {"srun": SRUN, "scontrol": '#!/bin/bash\necho "$@" >> requeued\n'}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.MULTILINE))
        given = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": str(int.from_bytes(os.urandom(3), "little")),
            "SLURM_JOB_NODELIST": f"127.0.0.[1-{directives['nodes']}]",
            "STUB_NODES": directives["nodes"],
            "STUB_TASKS_PER_NODE": directives["ntasks-per-node"],
        }
        self.job_id, environ = given["SLURM_JOB_ID"], preloaded().shell_environment(given)
        bash = "import os; os.execvp('bash', ['bash', 'job.sh'])"
        self.process = preloaded().start([(["-c", bash], environ)], folder)

    def wait_for(self, *names: str) -> None:
        end = time.monotonic() + patience(DEADLINE_S)
        while not all((self.folder / name).exists() for name in names):
            assert self.process.pids, self.screen
            assert time.monotonic() < end, self.screen
            self.process.see(0.02)

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE_S)

    @property
    def screen(self) -> str:
        return (self.folder / "output.txt").read_text()

    @property
    def was_requeued(self) -> bool:
        file = self.folder / "requeued"
        return file.exists() and file.read_text() == f"requeue {self.job_id}\n"


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Starter]:
    """Starts what `python -m ddpshim slurm` prints."""
    started = []

    def start(script: str) -> Batch:
        started.append(Batch(tmp_path, script))
        return started[-1]

    yield start
    for job in started:
        job.process.kill()


def check_shell(script: Path) -> None:
    """Run the checkers that are here on a script of bash."""
    for checker in (["bash", "-n"], ["shellcheck"]):
        if shutil.which(checker[0]):
            ran = subprocess.run([*checker, script], capture_output=True, text=True, timeout=patience(120), check=False)
            assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def script_of(*program: str, **options: Any) -> str:
    """What `ddpshim slurm` prints."""
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return batch_script(program, command_line._parser().parse_args(["slurm", *given, *program]))


def cpu_job(*program: str, **settings: Any) -> str:
    given = {"nodes": 2, "gpus_per_node": 0, "nproc_per_node": 1, "time": "10", "launcher": "srun", **settings}
    return script_of(*program, **given)


def test_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--nodes 2 --gpus-per-node 4 --cpus-per-rank 8 --time 1-12 --launcher srun"
    argv = ["slurm", *options.split(), "--", "-m", "robomimic.scripts.train", "--config", "my config.json"]
    assert command_line.main(argv) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=ddpshim\n")
    given = "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=8", "time=1-12"
    # In front of the first command, after which sbatch reads no line.
    directives, _ = script.split("\nset -euo pipefail\n")
    for directive in (*given, "output=%x-%j.out", "open-mode=append", "signal=USR1@120", "requeue"):
        assert f"\n#SBATCH --{directive}\n" in directives
    assert " give srun below --output=rank_%t.log.\n" in script
    assert '\nexport PYTHONHASHSEED="${PYTHONHASHSEED:-0}"' in script
    command = "python -u -m ddpshim.launch.rank -m robomimic.scripts.train --config 'my config.json' || code=$?"
    assert f"\nsrun --kill-on-bad-exit=0 --wait=60 --cpus-per-task=8 {command}\n" in script


def test_under_torchrun_what_the_site_decides_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    assert command_line.main(["slurm", str(tmp_path / "train.py")]) == 0
    script, said = capsys.readouterr()
    names = re.findall("^#SBATCH --([^=\n]+)", script, re.MULTILINE)
    asked = ["nodes", "ntasks-per-node", "gpus-per-node"]
    assert (said, names) == ("", ["job-name", *asked, "output", "open-mode", "signal", "requeue"])
    assert "\n# Each rank's output goes to ddpshim-logs/TIME-PID/rank_N.log" in script
    assert "\n#SBATCH --cpus-per-task=4\n" in script_of("train.py", gpus_per_node=4)  # or four ranks get one core
    script = script_of("train.py", "-x", gpus_per_node=4, cpus_per_rank=8)
    assert "\n#SBATCH --ntasks-per-node=1\n" in script
    assert "\n#SBATCH --cpus-per-task=32\n" in script
    command = "srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task=32 python -m ddpshim run --nproc=4 train.py -x"
    assert f"\n{command} || code=$?\n" in script
    with pytest.raises(LaunchError, match="--gpus-per-node=0 without --nproc-per-node: no rank would be started"):
        cpu_job("train.py", nproc_per_node=None)


@pytest.mark.launch
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_the_script_passes_the_checkers(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "job.sh").write_text(cpu_job("train.py", "--config", "a b.json", launcher=launcher))
    check_shell(tmp_path / "job.sh")


@pytest.mark.launch
def test_a_failure_is_the_exit_code_and_requeues_nothing(tmp_path: Path, batch: Starter) -> None:
    job = batch(cpu_job("train.py", "3", cpus_per_rank=2))
    assert job.exit_code() == 3, job.screen
    assert not job.was_requeued
    assert f"job {job.job_id} (restart 0) on 127.0.0.[1-2], in {tmp_path}\n" in job.screen
    assert "srun option --cpus-per-task=2" in job.screen


@pytest.mark.launch
@pytest.mark.parametrize(("launcher", "ranks_per_node"), [("srun", 2), ("torchrun", 1)])
def test_the_ranks_are_signalled_save_and_the_job_is_requeued(
    tmp_path: Path, batch: Starter, launcher: str, ranks_per_node: int
) -> None:
    job = batch(cpu_job("train.py", "--wait", "a b", launcher=launcher, nproc_per_node=ranks_per_node))
    numbers = range(2 * ranks_per_node)
    job.wait_for("tasks", *(f"ready_{number}" for number in numbers))
    if launcher == "srun":
        job.process.send(signal.SIGUSR1)  # the shell may get it, too
    for task in (tmp_path / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    assert job.exit_code() == 75, job.screen
    assert job.was_requeued
    # The others' are in their nodes' logs where `run` starts them.
    for number in numbers if launcher == "srun" else [0]:
        assert job.screen.count(f"rank {number} of {len(numbers)} saved on SIGUSR1") == 1, job.screen


@pytest.mark.launch
def test_it_trains_on_two_emulated_nodes(tmp_path: Path, batch: Starter) -> None:
    job = batch(cpu_job(str(ROOT / "tests" / "matrix_train.py"), "."))
    assert job.exit_code() == 0, job.screen
    zero, one = (json.loads((tmp_path / f"rank_{number}.json").read_text()) for number in (0, 1))
    assert (zero["world_size"], zero["launcher"], one["node_rank"]) == (2, "slurm", 1)
    assert zero["weight"] == one["weight"]
    assert zero["loss"] == 2.541748046875  # that of one process, see test_launch_matrix.py
    assert not job.was_requeued
