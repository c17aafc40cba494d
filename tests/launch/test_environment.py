"""`python -m ddpshim selftest --env`: what is in the report, and what must not be."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ddpshim
from ddpshim.__main__ import main
from ddpshim.observe import environment
from ddpshim.observe.environment import as_text, describe
from ddpshim.process import machine
from ddpshim.robomimic import adapter
from ddpshim.trainers.patching import files, in_memory
from tests.preloaded_commands import patience

ROOT = Path(__file__).parents[2]
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "secretgpu[01-02]",
    "SLURM_JOB_PARTITION": "topsecretpartition",
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if environment._RELEVANT.fullmatch(name):
            monkeypatch.delenv(name)


@pytest.mark.launch
def test_versions_are_those_of_the_distributions_and_import_nothing() -> None:
    code = (
        "import sys; from ddpshim.observe.environment import describe; print(describe()['versions']['torch']);"
        "print([name for name in ('robomimic', 'h5py', 'diffusers', 'torch._dynamo') if name in sys.modules])"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=patience(240)
    )
    assert ran.stdout.splitlines() == [str(torch.__version__), "[]"], ran.stderr
    versions = describe()["versions"]
    assert versions["ddpshim"] == ddpshim.__version__
    assert versions["Python"].startswith(".".join(map(str, sys.version_info[:3])))


def test_the_report_has_the_launcher_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    report = describe()
    assert report["launch"]["launcher"] == "torchrun"
    assert "RANK='3'" in report["launch"]["because"]
    assert report["launch"]["place"] == "rank 3 of 4, local rank 1 of 2"
    assert report["launch"]["master"] == "127.0.0.1:29500"
    assert report["variables"] == {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_impossible_variables_are_reported_and_do_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK=5 is not below WORLD_SIZE=2" in describe()["launch"]["refused"]


def test_secrets_are_left_out_and_names_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {
        "NCCL_API_KEY": "hunter2",
        "TORCH_TOKEN": "hunter2",
        "DDPSHIM_PASSWORD": "hunter2",
        "WANDB_API_KEY": "hunter2",
        "UNRELATED": "hunter2",
        "TORCH_HOME": "/home/alice/cache/alice.d",
        "CUDA_HOME": "//alice:hunter2@server/cuda",
        "HOME": "/home/alice",
        "LOGNAME": "alice",
        "NCCL_DEBUG_FILE": "/tmp/login7.log",
        "NCCL_SOCKET_IFNAME": "ib0",
        **SLURM,
        "MASTER_ADDR": "secretgpu01",
        "MASTER_PORT": "29500",
    }
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "login7.cluster")
    report = describe()
    text = as_text(report) + json.dumps(report)
    for private in ("hunter2", "secretgpu", "alice", "topsecretpartition", "login7"):
        assert private not in text
    assert report["variables"]["TORCH_HOME"] == "<home>/cache/<user>.d"
    assert report["variables"]["NCCL_DEBUG_FILE"] == "/tmp/<host>.log"
    assert report["variables"]["NCCL_SOCKET_IFNAME"] == "ib0"
    assert report["variables"]["SLURM_JOB_NODELIST"] == "<host>"
    assert report["launch"]["because"].startswith("SLURM variables (SLURM_JOB_ID='77', SLURM_NTASKS='4')")
    named = describe(with_names=True)
    assert named["variables"]["MASTER_ADDR"] == "secretgpu01"
    assert named["machine"]["host"] == "login7.cluster"
    assert "hunter2" not in json.dumps(named)


def test_a_master_that_only_the_nodelist_names_is_hidden_too(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    for name, value in {**SLURM, **step}.items():
        monkeypatch.setenv(name, value)
    launch = describe()["launch"]
    assert launch["launcher"] == "slurm"
    assert launch["master"].startswith("<host>:")
    assert describe(with_names=True)["launch"]["master"].startswith("secretgpu01:")


def test_why_torch_sees_no_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("CUDA initialization: the driver is too old (found version 11040)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    expected = "torch sees none: CUDA initialization: the driver is too old (found version 11040)"
    assert describe()["GPUs"] == expected


def test_what_cannot_be_found_out_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    monkeypatch.setattr(machine, "memory", fail)
    report = describe(with_names=True)
    assert report["GPUs"] == report["machine"] == "unknown: RuntimeError: CUDA error: invalid device ordinal"
    assert report["versions"]["Python"]
    assert "machine: unknown: RuntimeError" in as_text(report)


def test_an_unedited_run_is_reported_as_patched_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(state="not applied", patch_set=SimpleNamespace(name="robomimic/0.3.0"))
    monkeypatch.setattr(files, "status", lambda package: found)
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda package: found)
    released = "files as released (robomimic/0.3.0); a launched training is patched in memory"
    assert adapter.state_of_files() == released
    for package, state in (("robomimic", "in memory: robomimic/0.3.0"), ("another", released)):
        finder = in_memory.PatchedFiles(in_memory.Patched("robomimic/0.3.0", {f"{package}.algo": b""}, ()))
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(sys, "meta_path", [finder, *sys.meta_path])
            assert describe()["robomimic patch"] == state
    found.state = "applied"
    assert adapter.state_of_files() == "applied (robomimic/0.3.0)"


def test_gpus_and_who_reaches_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA A100", total_memory=80 * 2**30, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 1})
    gpus = describe()["GPUs"]
    assert gpus["cuda:0"] == "NVIDIA A100, 80.0 GiB, compute capability 8.0, reaches the memory of cuda:1"
    assert gpus["cuda:2"].endswith("reaches the memory of no other")


def test_the_command_prints_text_or_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["selftest", "--env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sections = ["versions", "robomimic patch", "GPUs", "launch", "variables", "machine"]
    assert list(report) == sections
    assert main(["selftest", "--env"]) == 0
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines() if not line.startswith(" ")] == sections
    assert f"  torch      {torch.__version__}\n" in printed
    # As on a system that has neither of these.
    monkeypatch.setattr(environment.machine, "memory", lambda: environment.machine.Memory(None, None, None))
    monkeypatch.setattr(environment.machine, "numa_nodes", lambda: None)
    monkeypatch.setattr(environment.machine, "shared_memory", lambda: None)
    monkeypatch.setattr(environment.machine, "limits", lambda: None)
    assert main(["selftest", "--env"]) == 0
    printed = capsys.readouterr().out
    assert "shared memory  unknown" in printed
    assert "memory         unknown, available unknown, container's limit none" in printed
