"""The templates of examples/launch: well-formed, careful with their settings, and the ones that can run here do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch.test_launch_matrix import SCRIPT, _reports
from tests.preloaded import environment, preloaded
from tests.preloaded_commands import commands, patience

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "launch"
TEMPLATES = sorted(file.name for file in FOLDER.glob("*.sh"))


def start(name: str, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    forked = preloaded().shell_environment(environment())
    environ = {**forked, "PYTHON": str(commands() / "python"), **settings}
    return subprocess.run(
        ["bash", str(FOLDER / name)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_well_formed(name: str) -> None:
    checkers = [["bash", "-n"], ["shellcheck"]]
    for checker in (checker for checker in checkers if shutil.which(checker[0])):
        ran = subprocess.run(
            [*checker, FOLDER / name], capture_output=True, text=True, timeout=patience(120), check=False
        )
        assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
    assert "\nset -euo pipefail\n" in (FOLDER / name).read_text()


SHOWN = [
    ("one_node.sh", {}, "-m ddpshim run --nproc=auto -m robomimic.scripts.train --config bc.json"),
    ("chosen_gpus.sh", {"GPUS": "2,5"}, "-m ddpshim run --nproc=2 -m robomimic.scripts.train --config bc.json"),
    (
        "two_nodes.sh",
        {"NODE_RANK": "1", "MASTER_ADDR": "gpu1", "TRAIN": "train.py -x"},
        "-m ddpshim run --nnodes=2 --node-rank=1 --master-addr=gpu1 --master-port=29500 --nproc=gpu train.py -x",
    ),
    (
        "slurm.sh",
        {"NODES": "2", "TRAIN": "train.py -x", "PARTITION": "gpu"},
        "srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task=8 python -u -m ddpshim.launch.rank train.py -x || code=$?",
    ),
    (
        "lerobot_template.sh",
        {"GPUS": "2", "RESUME": "0", "WANDB": "1", "PRECISION": "bf16"},
        "-m ddpshim run --nproc=2 -m lerobot.scripts.lerobot_train --policy.type=act --policy.push_to_hub=false "
        "--dataset.repo_id=lerobot/pusht --output_dir=outputs/train/act --batch_size=8 --steps=100000 --num_workers=4 "
        "--save_freq=20000 --log_freq=200 --seed=1000 --wandb.enable=true",
    ),
    (
        "lerobot_smolvla.sh",
        {"DATASET": "you/yours"},
        "--policy.path=lerobot/smolvla_base --policy.push_to_hub=false --dataset.repo_id=you/yours "
        "--output_dir=outputs/train/smolvla_base --batch_size=64 --steps=20000",
    ),
    ("docker.sh", {"GPUS": "device=1"}, "ddpshim-train --nproc=auto --log-dir=/out/logs -m robomimic.scripts.train"),
]


@pytest.mark.parametrize(("name", "settings", "command"), SHOWN)
def test_a_dry_run_shows_the_command_and_starts_nothing(
    tmp_path: Path, name: str, settings: dict[str, str], command: str
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    ran = start(name, tmp_path, DRY_RUN="1", **settings)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert command in ran.stdout
    written = ["train.sbatch"] if name == "slurm.sh" else []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.py", *written]


@pytest.mark.unit
def test_every_template_is_shown_by_a_test() -> None:
    assert sorted(name for name, _, _ in SHOWN) == TEMPLATES


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("one_node.sh", {"NPROC": "two"}, "NPROC='two'"),
        ("one_node.sh", {"TRAIN": "absent.py"}, "no file 'absent.py'"),
        ("chosen_gpus.sh", {"GPUS": "0;1"}, "GPUS='0;1'"),
        ("chosen_gpus.sh", {"GPUS": "1,1"}, "has 1 twice"),
        ("two_nodes.sh", {}, "NODE_RANK='': give 0 on the first machine, 1 on the second\nMASTER_ADDR is not set"),
        ("docker.sh", {"DATA": "/absent"}, "DATA='/absent' is no folder"),
        (
            "lerobot_template.sh",
            {"PRECISION": "half", "STEPS": "0"},
            "STEPS='0' must be a whole number of at least 1\n",
        ),
        ("lerobot_smolvla.sh", {"RESUME": "1"}, "checkpoints/last/pretrained_model/train_config.json is not there"),
    ],
)
def test_settings_are_checked(tmp_path: Path, name: str, settings: dict[str, str], said: str) -> None:
    ran = start(name, tmp_path, DRY_RUN="1", **settings)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert ran.stdout == ""


def test_slurms_settings_are_checked_by_the_command(tmp_path: Path) -> None:
    ran = start("slurm.sh", tmp_path, DRY_RUN="1", TIME="soon", NODES="0")
    assert ran.returncode == 2
    assert "--nodes='0' is not a whole number of at least 1" in ran.stderr
    assert "--time='soon' is not a time limit" in ran.stderr
    assert not (tmp_path / "train.sbatch").exists()


def test_one_node_trains(tmp_path: Path) -> None:
    ran = start("one_node.sh", tmp_path, NPROC="2", TRAIN=f"{SCRIPT} {tmp_path}", GLOO_SOCKET_IFNAME="lo")
    assert ran.returncode == 0, ran.stderr
    assert [report["loss"] for report in _reports(tmp_path)] == [2.541748046875] * 2
    assert "ranks    2\n" in ran.stdout
