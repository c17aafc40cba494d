"""`python -m ddpshim selftest`: it passes where all is well, and says what is wrong where a fault is put in."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpshim.__main__ import main
from ddpshim.tools import selftest
from ddpshim.tools.selftest import PROVES, compared
from tests import simulated_gpus
from tests.preloaded import environment, preloaded
from tests.preloaded_commands import patience


@pytest.mark.launch
@pytest.mark.parametrize("device", ["cpu", "shared GPUs"])
def test_every_check(device: str, tmp_path: Path) -> None:
    """On 3 ranks: no batch is divided evenly, and two simulated GPUs are shared."""
    if device != "cpu" and (reason := simulated_gpus.why_not()) is not None:
        pytest.skip(f"no simulated GPUs: {reason}")
    gpus = {"SIMULATED_GPUS_GENERATOR": "gpu"} if device != "cpu" else {}
    command = ["ddpshim", "selftest", "--nproc", "3", *(["--gpu"] if gpus else [])]
    made = preloaded(on_gpus=bool(gpus))
    job = made.start([(command, {**made.shell_environment(environment()), **gpus})], tmp_path)
    code, said = job.wait(300), (tmp_path / "output.txt").read_text()
    assert code == 0, said
    first, *lines, last = said.splitlines()
    shown = "2 GPUs, shared: gloo in place of nccl" if gpus else "CPU"
    assert (first, last) == (f"ddpshim selftest: 3 ranks, {shown}", "selftest passed")
    assert [line.split()[0] for line in lines if " s  " in line] == [name.split()[0] for name in PROVES]
    assert lines[1].strip().startswith("gloo on cuda:0 (Simulated GPU)" if gpus else "gloo on cpu (CPU)")
    found = re.findall(r"differ by (\S+)", said)
    assert len(found) == 6
    assert all(float(number) < 1e-12 for number in found)
    assert [path.name for path in tmp_path.iterdir()] == ["output.txt"]


SAME = {name: {"losses": [1.0]} for name in ("dropout", "BatchNorm", "data workers")}
STARTED = {"name": "start", "seconds": 1.0, "detail": "gloo"}
STARTED_AND_SUMMED = [STARTED, {**STARTED, "name": "all-reduce"}]
# What each job writes into its file, its exit code and its last lines, where all is well.
JOBS = {
    "ranks": (STARTED_AND_SUMMED, 137, "rank 1 ended by SIGKILL"),
    "one": ([SAME], 0, ""),
    "several": ([SAME], 0, ""),
}


@pytest.mark.parametrize(
    ("job", "answer", "last", "said"),
    [
        ("ranks", ([], 1, "no network"), "start", "no network"),
        ("ranks", ([STARTED], 1, "wrong numbers"), "all-reduce", "wrong numbers"),
        ("one", ([], 1, "no numbers"), "one process", "no numbers"),
        ("several", ([], 3, "no ranks"), "dropout", "no ranks"),
        ("several", ([{**SAME, "BatchNorm": {"losses": [2.0]}}], 0, ""), "BatchNorm", "losses differ by 1e+00 of the"),
        ("ranks", (STARTED_AND_SUMMED, 3, "rank 1 ended by SIGKILL"), "killed rank", "exit code 3, where 137 says"),
        ("ranks", (STARTED_AND_SUMMED, 137, "rank 0 ended by SIGKILL"), "killed rank", "rank 1 was not named"),
        ("ranks", (STARTED_AND_SUMMED, 0, ""), "killed rank", "exit code 0, where 137 says"),
    ],
)
def test_a_fault_is_named_and_ends_the_test(
    job: str, answer: Any, last: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    answers = JOBS

    def call(folder: Path, environ: Any, timeout_s: float, command: list[str]) -> tuple[int, float, str]:
        file = Path(command[-1])
        written, code, output = answers[file.stem]
        if written:
            file.write_text("\n".join(map(json.dumps, written)))
        return code, 1.0, output

    monkeypatch.setattr(selftest, "_call", call)
    assert selftest.selftest(2)
    capsys.readouterr()
    answers = {**JOBS, job: answer}
    assert not selftest.selftest(2)
    before, _, after = capsys.readouterr().out.partition("FAILED")
    assert before.splitlines()[-1].strip() == last
    assert said in after


@pytest.mark.launch
def test_a_job_has_its_code_its_last_lines_and_a_deadline(tmp_path: Path) -> None:
    for timeout_s, does, code, last in (
        (patience(60.0), "sys.exit('in vain')", 1, "in vain"),
        (0.5, "time.sleep(1000)", 124, "not finished within 0.5 s; a slow machine needs a longer --timeout"),
    ):
        command = [sys.executable, "-I", "-S", "-c", f"import sys, time; print('here', flush=True); {does}"]
        found, _, said = selftest._call(tmp_path, os.environ, timeout_s, command)
        assert (found, said.splitlines()[-1]) == (code, last)


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
