"""`python -m ddpshim selftest`: it passes where all is well, and says what is wrong where a fault is put in."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpshim
from ddpshim.__main__ import main
from ddpshim.process import machine
from ddpshim.tools import selftest
from ddpshim.tools.selftest import PROVES, compared
from tests import simulated_gpus
from tests.preloaded_commands import patience, python

ROOT = Path(__file__).parents[2]


@pytest.mark.launch
@pytest.mark.parametrize("device", ["cpu", "shared GPUs"])
def test_every_check(device: str, tmp_path: Path) -> None:
    """On 3 ranks: no batch is divided evenly, and two simulated GPUs are shared."""
    if device != "cpu" and (reason := simulated_gpus.why_not()) is not None:
        pytest.skip(f"no simulated GPUs: {reason}")
    gpus = simulated_gpus.environment(SIMULATED_GPUS_GENERATOR="gpu") if device != "cpu" else {}
    options = ["--gpu"] if gpus else []
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **gpus}
    command = ["-m", "ddpshim", "selftest", "--nproc", "3", *options]
    said = python(*command, environ=environ, deadline_s=300, cwd=tmp_path, stdin=subprocess.DEVNULL)
    first, *lines, last = said.splitlines()
    shown = "2 GPUs, shared: gloo in place of nccl" if gpus else "CPU"
    assert (first, last) == (f"ddpshim selftest: 3 ranks, {shown}", "selftest passed")
    assert [line.split()[0] for line in lines if " s  " in line] == [name.split()[0] for name in PROVES]
    assert lines[1].strip().startswith("gloo on cuda:0 (Simulated GPU)" if gpus else "gloo on cpu (CPU)")
    found = re.findall(r"differ by (\S+)", said)
    assert len(found) == 6
    assert all(float(number) < 1e-12 for number in found)
    assert not [*tmp_path.iterdir()]


def _one_process(result: str) -> str:
    return f"import json, pathlib, sys\npath = pathlib.Path(sys.argv[1])\npath.write_text(json.dumps({result}))\n"


OTHER = '{n: {"losses": [1.0 + ("several" in path.name)]} for n in ("dropout", "BatchNorm", "data workers")}'
DIES = "import sys\nif not sys.argv[1:]:\n    {}\n"


@pytest.mark.launch
@pytest.mark.parametrize(
    ("replaced", "program", "last", "said"),
    [
        ("ranks", "raise SystemExit('no network')", "start", "no network"),
        ("trainings", "raise SystemExit('no numbers')", "one process", "no numbers"),
        ("trainings", _one_process(OTHER), "dropout", "losses differ by 1e+00 of the largest, at most 1e-09 expected"),
        ("ranks", DIES.format("raise SystemExit(3)"), "killed rank", "exit code 3, where 137 says"),
        ("ranks", DIES.format("while True: pass"), "killed rank", "not finished within"),
    ],
    ids=["no start", "one process", "another experiment", "no kill", "no end"],
)
def test_a_fault_is_named_and_ends_the_test(
    replaced: str, program: str, last: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    quick = {"ranks": "pass", "trainings": _one_process(OTHER.replace('("several" in path.name)', "0"))}
    for name, text in {**quick, replaced: program}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setattr(selftest, f"_{name.upper()}", str(tmp_path / f"{name}.py"))
    assert not selftest.selftest(2, timeout_s=patience(20.0 if "while" in program else 120.0))
    before, _, after = capsys.readouterr().out.partition("FAILED")
    assert before.splitlines()[-1].strip() == last
    assert said in after


def test_what_is_the_same_and_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for weights in ([1.0, 2.0], [1.0, 2.0 + 1e-8], [1.0, float("nan")], [1.0]):
        result = compared("dropout", {"weights": weights}, {"weights": [1.0, 2.0]}, 1.0)
        assert result.is_good is (weights == [1.0, 2.0])
        assert ("Report this" in result.detail) is (not result.is_good and len(weights) == 2)
    assert main(["selftest", "--nproc", "1"]) == 2
    assert "one rank has nobody to add with" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["selftest", "--gpu"]) == 2
        assert "sees no GPU, so there is nothing to test" in capsys.readouterr().err


def test_a_bug_report_has_torchs_words_and_three_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NCCL_DEBUG": "INFO"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "PyTorch version: here")
    assert main(["selftest", "--env"]) == 0
    torchs, empty, versions, launch, last = capsys.readouterr().out.splitlines()
    assert (torchs, empty) == ("PyTorch version: here", "")
    assert versions.startswith(f"ddpshim {ddpshim.__version__}, Python 3.")
    assert launch.startswith("launch: rank 3 of 4, local rank 1 of 2, by torchrun (")
    assert "NCCL_DEBUG=INFO" in launch
    assert f"{machine.num_cores()} cores usable of" in last

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", fail)
    monkeypatch.setattr(machine, "memory", fail)
    torchs, _, _, launch, last = selftest.for_bug_report().splitlines()
    assert launch.startswith("launch: refused: RANK")
    assert torchs == last.partition("machine: ")[2] == "unknown: RuntimeError: CUDA error: invalid device ordinal"


def test_secrets_are_left_out_and_names_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {
        "NCCL_API_KEY": "hunter2",
        "DDPSHIM_PASSWORD": "hunter2",
        "DDPSHIM_CACHE": "/home/alice/cache/alice.d //alice:hunter2@server/cuda",
        "HOME": "/home/alice",
        "LOGNAME": "alice",
        "NCCL_DEBUG_FILE": "/tmp/login7.log",
        "MASTER_ADDR": "secretgpu01",
    }
    monkeypatch.delenv("DDPSHIM_UPSTREAM", raising=False)
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "login7.cluster")
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "at secretgpu01, of alice on login7")
    text = selftest.for_bug_report()
    for private in ("hunter2", "secretgpu", "alice", "login7"):
        assert private not in text
    assert "at <host>, of <user> on <host>" in text
    assert "DDPSHIM_CACHE=<home>/cache/<user>.d //<user>@server/cuda NCCL_API_KEY=<secret>" in text.replace(
        " DDPSHIM_PASSWORD=<secret>", ""
    )
    assert selftest.without_names("malice") == "malice"
