"""`python -m ddpshim selftest`: it passes where all is well, and says what is wrong where a fault is put in."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddpshim.__main__ import main
from ddpshim.errors import LaunchError
from ddpshim.tools.selftest import command
from ddpshim.tools.selftest.command import PROVES, Plan, compared, selftest
from tests import simulated_gpus
from tests.preloaded_commands import python

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
    command = ["-m", "ddpshim", "selftest", "--nproc", "3", "--json", "--write", "made.json", *options]
    said = python(*command, environ=environ, deadline_s=300, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert said == '{"is_good": true}\n'
    made = json.loads((tmp_path / "made.json").read_text())
    checks = {check["name"]: check for check in made["checks"]}
    assert list(checks) == list(PROVES)
    assert all(check["is_good"] for check in checks.values())
    assert made["is_complete"] is True
    assert made["versions"]["torch"] == str(torch.__version__)
    assert checks["start"]["detail"].startswith("gloo on cuda:0 (Simulated GPU)" if gpus else "gloo on cpu (CPU)")
    assert re.match(r"latency \S+ ms, bus bandwidth \S+ GB/s at 4 MB", checks["all-reduce"]["detail"])
    for name in ("dropout", "BatchNorm", "data workers"):
        found = re.findall(r"differ by (\S+)", checks[name]["detail"])
        assert len(found) == 2
        assert all(float(number) < 1e-12 for number in found)
    assert str(tmp_path) not in json.dumps(made)
    assert [path.name for path in tmp_path.iterdir()] == ["made.json"]


def _one_process(result: str) -> str:
    return f"import json, pathlib, sys\npath = pathlib.Path(sys.argv[1])\npath.write_text(json.dumps({result}))\n"


OTHER = '{n: {"losses": [1.0 + ("ranks" in path.name)]} for n in ("dropout", "BatchNorm", "data workers")}'


@pytest.mark.launch
@pytest.mark.parametrize(
    ("replaced", "program", "last", "said"),
    [
        ("machine", "raise SystemExit('no network')", "start", "no network"),
        ("trainings", "raise SystemExit('no numbers')", "one process", "no numbers"),
        ("trainings", _one_process(OTHER), "dropout", "losses differ by 1e+00 of the largest, at most 1e-09 expected"),
        ("rank_that_dies", "raise SystemExit(3)", "killed rank", "exit code 3, where 137 says"),
        ("rank_that_dies", "while True: pass", "killed rank", "not finished within"),
    ],
    ids=["machine", "one process", "another experiment", "no kill", "no end"],
)
def test_a_fault_is_named_and_ends_the_test(
    replaced: str, program: str, last: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"machine": "pass", "trainings": _one_process(OTHER.replace('("ranks" in path.name)', "0"))}
    for name, text in {**quick, replaced: program}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setattr(command, name, SimpleNamespace(__file__=str(tmp_path / f"{name}.py")))
    lines: list[str] = []
    assert not selftest(Plan(nproc=2, timeout_s=20.0 if "while" in program else 120.0), say=lines.append)
    assert lines[-1].split("FAILED")[0].strip() == last
    assert said in lines[-1]


@pytest.mark.parametrize(
    ("weights", "is_good"),
    [([1.0, 2.0], True), ([1.0, 2.0 + 1e-8], False), ([1.0, float("nan")], False), ([1.0], False)],
)
def test_what_is_the_same(weights: list[float], is_good: bool) -> None:
    result = compared("dropout", {"weights": weights}, {"weights": [1.0, 2.0]}, 1.0)
    assert result.is_good is is_good
    assert ("Report this" in result.detail) is (not is_good and len(weights) == 2)


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"cannot be written .*Name a file"):
        selftest(Plan(), tmp_path / "absent" / "made.json")
    if not torch.cuda.is_available():
        assert main(["selftest", "--gpu"]) == 2
        assert "sees no GPU, so there is nothing to test" in capsys.readouterr().err


def test_a_report_has_no_folders() -> None:
    text = 'File "/home/me/lab/train.py", line 3: ~/secret/data.hdf5, 3/4 of 1/2 GB/s'
    assert command._without_folders(text) == 'File "train.py", line 3: data.hdf5, 3/4 of 1/2 GB/s'
