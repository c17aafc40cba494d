"""The templates of examples/launch: well-formed, careful with their settings, and the ones that can run here do."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.launch.test_launch_matrix import SCRIPT, _reports
from tests.launch.test_slurm import check_shell
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
    check_shell(FOLDER / name)
    assert "\nset -euo pipefail\n" in (FOLDER / name).read_text()
    assert name in {shown for shown, _, _ in SHOWN}


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


def test_one_node_trains(tmp_path: Path) -> None:
    ran = start("one_node.sh", tmp_path, NPROC="2", TRAIN=f"{SCRIPT} {tmp_path}", GLOO_SOCKET_IFNAME="lo")
    assert ran.returncode == 0, ran.stderr
    assert [report["loss"] for report in _reports(tmp_path)] == [2.541748046875] * 2
    assert "ranks    2\n" in ran.stdout


YAML = {
    "skypilot.yaml": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "gpu1\ngpu2"},
    "kubeflow.yaml": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"},
    "trainjob.yaml": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "gpu1", "PET_MASTER_PORT": "29500"},
}


@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("*.yaml")))
def test_each_node_of_an_engine_calls_run_with_its_number(tmp_path: Path, name: str) -> None:
    job = pytest.importorskip("yaml").safe_load((FOLDER / name).read_text())
    if name == "skypilot.yaml":
        assert job["resources"] == {"accelerators": "A100:4", "job_recovery": {"recover_on_exit_codes": [75]}}
        shell, nodes, environ = ["bash", "-c", job["run"]], job["num_nodes"], job["envs"]
    else:
        if name == "kubeflow.yaml":
            job, (main, workers) = job["spec"], job["spec"]["pytorchReplicaSpecs"].values()
            assert main["template"] == workers["template"]
            (node,) = main["template"]["spec"]["containers"]
            assert (node["name"], job["nprocPerNode"]) == ("pytorch", "4")
            nodes, resources = main["replicas"] + workers["replicas"], node["resources"]
        else:
            node = job["spec"]["trainer"]
            nodes, resources = node["numNodes"], node["resourcesPerNode"]
            assert node["numProcPerNode"] == 4
        assert resources == {"limits": {"nvidia.com/gpu": 4}}
        shell, environ = [*node["command"], *node["args"]], {entry["name"]: entry["value"] for entry in node["env"]}
    (tmp_path / "python").write_text('#!/bin/bash\necho "$@" "${RANK-none}" "${WORLD_SIZE-none}" $DDPSHIM_RESUME\n')
    (tmp_path / "python").chmod(0o755)
    environ = {**environ, **YAML[name], "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if name != "skypilot.yaml":
        environ.update(RANK="1", WORLD_SIZE="2")
    said = subprocess.run(shell, env=environ, capture_output=True, text=True, timeout=patience(60), check=True).stdout
    assert nodes == 2
    assert said == (
        "-m ddpshim run --nproc 4 --nnodes 2 --node-rank 1 --master-addr gpu1 --master-port 29500 "
        "train.py --config bc.json none none always\n"
    )


@pytest.mark.parametrize("code", [0, 75])
def test_each_worker_of_ray_starts_one_rank(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    called: list[Any] = []
    made = mock.Mock(side_effect=lambda rank, **how: SimpleNamespace(fit=rank))
    kinds = dict.fromkeys(("FailureConfig", "RunConfig", "ScalingConfig"), dict)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(**kinds))
    monkeypatch.setitem(sys.modules, "ray.train.torch", SimpleNamespace(TorchConfig=dict, TorchTrainer=made))
    monkeypatch.setattr(sys, "argv", ["on_ray.py", "-m", "mine", "a b"])
    monkeypatch.setattr(dist, "broadcast_object_list", lambda port: port.__setitem__(0, 4321))
    monkeypatch.setattr(
        subprocess, "run", lambda *how, **also: called.append((how, also)) or SimpleNamespace(returncode=code)
    )
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    if code:
        with pytest.raises(RuntimeError, match=r"^rank 3 ended with exit code 75: "):
            runpy.run_path(str(FOLDER / "on_ray.py"))
    else:
        runpy.run_path(str(FOLDER / "on_ray.py"))
    (((command,), how),) = called
    assert command == [sys.executable, "-u", "-m", "ddpshim.launch.rank", "-m", "mine", "a b"]
    expected = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "4321", "DDPSHIM_RESUME": "always"}
    assert expected.items() <= how["env"].items()
    assert how["cwd"] == os.getcwd()
    assert made.call_args.kwargs["scaling_config"] == {"num_workers": 8, "use_gpu": True}
