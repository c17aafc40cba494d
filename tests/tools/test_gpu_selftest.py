"""`selftest --gpu`: all of it on a simulated pair of GPUs; what each check tells, and its page, without."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Optional

import pytest
import torch

import ddpshim
from ddpshim.__main__ import main
from ddpshim.errors import LaunchError, SyncError, WorldError
from ddpshim.job.world import World
from ddpshim.tools.selftest import failing, gpu, gpu_checks, gpu_programs
from ddpshim.tools.selftest.checks import Outcome, Place
from ddpshim.tools.selftest.gpu import CHECKS, FAILED, NOT_RUN, PASSED, Check, Result
from ddpshim.tools.selftest.gpu_checks import GpuRank
from ddpshim.tools.selftest.running import Plan, SelfTestFailed
from evidence import gpu_page
from tests import simulated_gpus
from tests.preloaded import preloaded
from tests.preloaded_commands import commands, patience
from tests.ranks import run_ranks

# Its processes are forked from one with torch imported: argv[1] is that Python.
_FORKED = """
import sys, multiprocessing.spawn, torch
sys.executable = sys.argv.pop(1)
multiprocessing.spawn.set_executable(sys.executable)
from ddpshim.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.launch
def test_every_check_on_a_simulated_pair(tmp_path: Path) -> None:
    """The first person with GPUs is to test GPUs, and not this script."""
    if (reason := simulated_gpus.why_not()) is not None:
        pytest.skip(f"no simulated GPUs: {reason}")
    file, python = tmp_path / "gpus.json", str(commands() / "python")
    ran = subprocess.run(
        [python, "-c", _FORKED, python, "selftest", "--gpu", "--quick", "--write", str(file)],
        env=preloaded(on_gpus=True).shell_environment(
            {**os.environ, **simulated_gpus.environment(SIMULATED_GPUS_GENERATOR="gpu")}
        ),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
    )
    assert file.exists(), ran.stdout + ran.stderr
    written = json.loads(file.read_text())
    told = {(check["stage"], check["name"]): check for check in written["checks"]}
    bad = {name: check["detail"] for name, check in told.items() if check["outcome"] == FAILED}
    assert not bad, ran.stdout
    assert {name: check["detail"] for (_, name), check in told.items() if check["outcome"] == NOT_RUN} == {
        "rendering": "mujoco is not installed",
        "robomimic": "only without --quick",
    }
    assert list(told) == [(check.stage, check.name) for check in CHECKS]
    assert ran.returncode == 0
    assert f"{len(CHECKS) - 2} passed, 0 failed, 2 not run" in ran.stdout.splitlines()[-1]
    texts = json.dumps(written)
    assert str(tmp_path) not in texts
    assert str(gpu_page.ROOT) not in texts
    assert re.search(r"named after \d\.\d s, after \d+\.\d s the job was over", told["failures", "kill"]["detail"])
    versions = rf"torch {re.escape(torch.__version__)}, NCCL \S+, 2 x Simulated GPU \(9\.0\)"
    assert re.fullmatch(versions, told["ranks", "facts"]["detail"])
    # Of the largest change of a weight; a gradient that does not cross the ranks makes 0.01 and more.
    apart = re.findall(r"(\S+) in (float64|float32) \(limit", told["ranks", "U-Net"]["detail"])
    assert [float(number) < {"float64": 1e-12, "float32": 1e-5}[kind] for number, kind in apart] == [True, True]
    with pytest.raises(gpu_page.Refused, match="its GPUs are simulated"):
        gpu_page.read(file)


def _rank_on_the_cpu(folder: str) -> GpuRank:
    here = ddpshim.world()
    rank = GpuRank(Place(here.rank, 2, here.rank, 2, 0, "127.0.0.1", 1, "cpu", 30.0, folder, (), num_ranks=2))
    rank.world = here
    return rank


def _said_by(check: Any) -> str:
    try:
        return str(check())
    except (SyncError, WorldError, RuntimeError) as error:  # the latter: the other rank has failed, and left
        return f"{type(error).__name__}: {error}"


def _unreduced(module: Any, **options: Any) -> Any:
    return types.SimpleNamespace(
        module=module,
        parameters=module.parameters,
        loss=getattr(module, "loss", None),
        zero_grad=module.zero_grad,
        __call__=module,
    )


def _with_and_without_reductions(folder: str) -> dict[str, str]:
    """What checks say where gradients cross the ranks, and where they do not."""
    rank = _rank_on_the_cpu(folder)
    if rank.world.is_main:
        rank.one_process()
    rank.world.barrier()
    said = {
        "RNN": _said_by(lambda: rank.experiment("RNN")),
        "streams": _said_by(rank.streams),
        "branches": _said_by(rank.branches),
        "odd calls": _said_by(rank.odd_calls),
        "guards": _said_by(lambda: rank.bites("weights")),
    }
    gpu_checks.wrap_parallel = _unreduced  # type: ignore[assignment]
    said["unreduced"] = _said_by(lambda: rank.experiment("RNN"))
    return said


@pytest.mark.ranks
def test_a_machine_whose_gradients_do_not_cross_is_found(tmp_path: Path) -> None:
    by_rank = run_ranks(_with_and_without_reductions, 2, str(tmp_path), environ={"DDPSHIM_GUARD": "0"})
    for said in by_rank:
        assert "a weight differs by at most" in said["RNN"]
        assert said["streams"].startswith("U-Net and RNN with random delays")
        assert said["branches"].startswith("5 networks in one backward pass")
        assert said["odd calls"] == f"as the bare network: {', '.join(gpu_checks.ODD_CALLS)}"
        # They are off.
        assert said["guards"].startswith(
            "SyncError: rank 1's weights differ from step 3 on, and no guard said so in 12"
        )
    (broken,) = (
        said["unreduced"] for said in by_rank if said["unreduced"].startswith("SyncError")
    )  # the one farthest off
    assert re.search(
        r"RNN in float64: after 6 steps \S+ differs from one process by \d\.\de-0[12] of the largest", broken
    )


def test_a_sync_is_told_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with gpu_checks._refused_syncs(True) as reason:
        assert reason is None
        with pytest.raises(SyncError, match="a step waits for the GPU"):
            torch.cuda.synchronize()
    assert modes == ["error", "default"]

    def lacks(mode: str) -> None:
        raise AttributeError

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lacks)
    with gpu_checks._refused_syncs(True) as reason:
        assert reason == "torch.cuda.set_sync_debug_mode does not work here (AttributeError)"


class _Ranks:
    """Ranks of which each set answers until a check fails."""

    sets: ClassVar[list[tuple[str, ...]]] = []

    def reports_of(self, name: str, timeout_s: float) -> list[Outcome]:
        if name in ("links", "U-Net"):
            failure = SelfTestFailed(f"{name}, rank 1: broken")
            failure.rank = 1
            raise failure
        reason = name == "rendering"
        return [Outcome(rank, 0.0, 0.5 + rank, f"{name} was done", is_not_run=reason) for rank in range(2)]


@pytest.fixture
def broken_machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    @contextlib.contextmanager
    def started(options: Plan, *_: Any, checks: tuple[str, ...], **place: Any) -> Iterator[Any]:
        _Ranks.sets.append(checks)
        yield None, _Ranks()

    monkeypatch.setattr(gpu, "started", started)
    monkeypatch.setattr(_Ranks, "sets", [])
    return _Ranks


def test_after_a_check_that_fails_the_others_run_on_new_ranks(broken_machine: Any) -> None:
    names = ("rendezvous", "facts", "links", "RNN", "U-Net", "rendering")
    checks = [Check(name, f"{name} works") for name in names]
    results = list(gpu._on_ranks(Plan(nproc=2), Path(), None, checks, {}))
    assert [(result.name, result.outcome) for result in results] == [
        ("rendezvous", PASSED),
        ("facts", PASSED),
        ("links", FAILED),
        ("RNN", PASSED),
        ("U-Net", FAILED),
        ("rendering", NOT_RUN),
    ]
    assert _Ranks.sets == [names, ("rendezvous", "RNN", "U-Net", "rendering"), ("rendezvous", "rendering")]
    assert (results[2].rank, results[2].device, results[2].detail) == (1, "cuda:1", "links, rank 1: broken")
    assert (results[1].seconds, results[1].detail) == (1.5, "facts was done")
    assert gpu.as_line(results[2]).splitlines()[1].strip() == "rank 1, cuda:1: links, rank 1: broken"


def test_ranks_that_do_not_start_leave_the_other_checks_not_run(broken_machine: Any) -> None:
    results = list(gpu._on_ranks(Plan(nproc=2), Path(), None, [Check("links", "meets"), Check("RNN", "trains")], {}))
    assert [(result.outcome, result.detail) for result in results] == [
        (FAILED, "links, rank 1: broken"),
        (NOT_RUN, "the ranks did not start"),
    ]


def test_a_machine_that_ends_early_leaves_what_it_has_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def crashes() -> Iterator[Result]:
        yield Result("facts", "ranks", "it works", PASSED)
        raise KeyboardInterrupt

    file = tmp_path / "gpus.json"
    with pytest.raises(KeyboardInterrupt):
        _accept(monkeypatch, [PASSED], file, crashes())
    written = json.loads(file.read_text())
    assert [check["name"] for check in written["checks"]] == ["facts"]
    assert not written["is_complete"]


def test_ranks_that_cannot_be_started_end_no_acceptance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise LaunchError("no port is free")

    checks = [Check(name, "it works", "some") for name in ("rendezvous", "facts", "links")]
    monkeypatch.setattr(gpu, "CHECKS", (*checks, Check("robomimic", "it works", "other", num_ranks=9)))
    monkeypatch.setattr(gpu, "started", refuse)
    assert [
        (result.name, result.outcome, result.detail) for result in gpu._run(Plan(nproc=2), False, tmp_path, None)
    ] == [
        ("rendezvous", FAILED, "no port is free"),
        ("facts", NOT_RUN, "nothing could be started after 'rendezvous'"),
        ("links", NOT_RUN, "nothing could be started after 'rendezvous'"),
        ("robomimic", NOT_RUN, "it needs 9 ranks, and has 2"),
    ]


def test_with_one_gpu_what_needs_two_says_so() -> None:
    alone = {check.name for check in CHECKS if gpu._why_not(check, 1, False, {"one process", "save"}) is None}
    assert alone == {"rendezvous", "one process", "facts", "rendering"}
    links = next(check for check in CHECKS if check.name == "links")
    assert gpu._why_not(links, 1, False, set()) == "it needs 2 ranks, and has 1"
    assert gpu._why_not(links, 3, False, set(), shares=True) == "ranks share a GPU"
    on_one = {check.name for check in CHECKS if gpu._why_not(check, 3, False, {"one process", "save"}, True) is None}
    assert {"U-Net", "noise", "streams", "resume", "robomimic"} < on_one
    resume = next(check for check in CHECKS if check.name == "resume")
    assert gpu._why_not(resume, 2, False, {"one process"}) == "it needs the check 'save', which did not pass"
    assert [check.name for check in CHECKS if gpu._why_not(check, 2, True, {"one process", "save"})] == ["robomimic"]


def _accept(
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[str],
    file: Optional[Path] = None,
    found: Optional[Iterator[Result]] = None,
) -> tuple[str, bool]:
    results = [Result(f"check {n}", "ranks", "it works", outcome) for n, outcome in enumerate(outcomes)]
    results[0].detail = f'File "{Path.home()}/private/train.py", line 3 on gpu-node-17'
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-node-17")
    monkeypatch.setattr(gpu, "_run", lambda *_: found or iter(results))
    monkeypatch.setattr(gpu, "refuse_without_gpu", lambda: None)
    monkeypatch.setattr(gpu, "preloading_context", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("ddpshim.observe.environment._gpus", lambda: {"cuda:0": "A GPU, 80.0 GiB"})
    return gpu.accept(Plan(), file=file, say=lambda line: None)


def test_what_was_not_run_did_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "gpus.json"
    line, is_good = _accept(monkeypatch, [PASSED, NOT_RUN, NOT_RUN], file)
    assert is_good
    assert line.startswith("selftest on GPUs: 1 passed, 0 failed, 2 not run, 0 s; written to ")
    written = json.loads(file.read_text())
    assert written["checks"][0]["detail"] == 'File "train.py", line 3 on <host>'
    assert written["is_complete"]
    line, is_good = _accept(monkeypatch, [PASSED, FAILED])
    assert not is_good
    assert line.startswith("selftest on GPUs: 1 passed, 1 failed, 0 not run")


@pytest.mark.launch
def test_without_a_gpu_it_ends_before_torch_is_imported(tmp_path: Path) -> None:
    if any(map(gpu.glob.glob, gpu._DEVICES)):
        pytest.skip("there is a GPU")
    code = "import sys; from ddpshim.__main__ import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "selftest", "--gpu", "--write", "new.json"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(60), check=True)
    assert ran.stdout == "2 False\n"
    assert ran.stderr.startswith(
        "ddpshim: this machine has no visible GPU (no driver's device in /dev), so there is nothing to"
    )
    assert list(tmp_path.iterdir()) == []


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--quick"]) == 2
    assert "--quick and --write need --gpu, --names needs --env; nothing was tested" in capsys.readouterr().err
    assert main(["selftest", "--gpu", "--device", "cpu"]) == 2
    assert "it tests one machine with GPUs" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["selftest", "--gpu"]) == 2
    assert "CUDA_VISIBLE_DEVICES='' hides every GPU" in capsys.readouterr().err
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest", "--gpu"]) == 2
    assert re.search(r"torch \S+ (is built without|has) CUDA, and sees no GPU", capsys.readouterr().err)


def test_who_failed_is_read_from_what_a_job_writes() -> None:
    assert list(failing.FAULTS) == [check.name for check in CHECKS if check.stage == "failures"]
    said = {
        "exception": "ddpshim: rank 1 (node) failed:\nTraceback\n  File\nValueError: planted by the self-test\n",
        "out of memory": "ddpshim: rank 1 (node) failed:\nTraceback\ntorch.OutOfMemoryError: CUDA out of memory.\n",
        "stop": "  rank 1: gave no answer: its process 42 is stopped (by SIGSTOP)\n",
        "kill": "ddpshim: rank 1 failed first: it was ended by SIGKILL; nothing was printed\n",
    }
    for name, text in said.items():
        found = re.compile(gpu_programs._NAMES[name])
        assert found.search(text), name
        assert not found.search(text.replace("rank 1", "rank 0")), name
    # The reason is another rank's, of another start.
    both = said["exception"] + "ddpshim: rank 0 (node) failed:\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    assert not re.search(gpu_programs._NAMES["out of memory"], both)


_MACHINE: dict[str, Any] = {
    "schema": 1,
    "date": "2026-11-23",
    "is_quick": False,
    "is_complete": True,
    "num_ranks": 2,
    "versions": {
        "torch": "2.9.0",
        "CUDA": "12.8",
        "NCCL": "2.27.5",
        "NVIDIA driver": "570.1",
        "ddpshim": "0.1.0",
    },
    "GPUs": {"cuda:0": "NVIDIA H100, 80.0 GiB", "cuda:1": "NVIDIA H100, 80.0 GiB"},
    "checks": [
        {"name": "facts", "outcome": PASSED, "seconds": 1.0, "detail": "2 x", "rank": None, "device": None},
        {"name": "links", "outcome": PASSED, "seconds": 2.0, "detail": "400 GB/s", "rank": None, "device": None},
        {"name": "RNN", "outcome": FAILED, "seconds": 3.0, "detail": "off by 0.1", "rank": 1, "device": "cuda:1"},
        {"name": "rendering", "outcome": NOT_RUN, "seconds": 0.0, "detail": "no mujoco", "rank": None, "device": None},
    ],
}


def test_the_page_of_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps(_MACHINE))
    assert gpu_page.main([str(file), "--write", str(tmp_path / "page.md")]) == 0
    text = (tmp_path / "page.md").read_text()
    row = "| 1. 2 x NVIDIA H100 | 2 | 2.9.0 | 12.8 | 2.27.5 | 570.1 | 0.1.0 | 2026-11-23 | 2 | 1 | 1 |"
    assert row in text.splitlines()
    assert "No real GPU" not in text
    assert "| RNN | failed | 3.0 | rank 1, cuda:1: off by 0.1 |" in text
    assert "| links | passed | 2.0 | 400 GB/s |" in text
    assert "| facts | passed" not in text  # it has no number to show
    changes: list[tuple[dict[str, Any], str]] = [
        ({"versions": {"torch": "2.13.0+cpu"}}, "its GPUs are simulated"),
        ({"schema": 2}, "has schema 2"),
        ({"date": "/home/jo/runs/x"}, "names a machine, a user or a folder"),
        ({"checks": 3}, "is no file of"),
    ]
    for change, reason in changes:
        file.write_text(json.dumps({**_MACHINE, **change}))
        assert gpu_page.main([str(file)]) == 1
        assert reason in capsys.readouterr().err


def test_the_page_is_that_of_the_files_that_came() -> None:
    files = sorted(gpu_page.FILES.glob("*.json"))
    assert gpu_page.PAGE.read_text() == gpu_page.page([gpu_page.read(file) for file in files])
    assert ("No real GPU has been tested yet" in gpu_page.PAGE.read_text()) == (not files)


@pytest.mark.parametrize(
    ("taken", "pixel", "said"),
    [
        ((64, 0), 255, "each rank renders on its own GPU (64 MB there)"),
        ((0, 64), 255, "WorldError: rank 0 trains on cuda:0 and renders on cuda:1, which has another rank's"),
        ((1, 2), 255, "no GPU's memory grew while EGL rendered (1, 2 MB)"),
        ((64, 0), 0, "WorldError: the picture is black"),
    ],
)
def test_who_renders_where_is_read_from_memory(
    taken: tuple[int, int], pixel: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [2**30, 2**30]

    class Renderer:
        def __init__(self, model: Any, height: int, width: int) -> None:
            free[:] = [now - mb * 2**20 for now, mb in zip(free, taken)]

        def update_scene(self, state: Any) -> None: ...

        def close(self) -> None: ...

        def render(self) -> Any:
            return torch.full((2048, 2048, 3), pixel, dtype=torch.uint8)

    model = types.SimpleNamespace(from_xml_string=lambda text: text)
    mujoco = types.SimpleNamespace(__spec__=1, MjModel=model, MjData=str, Renderer=Renderer, mj_forward=lambda *_: None)
    monkeypatch.setitem(sys.modules, "mujoco", mujoco)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu], 2**30))
    for name in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "EGL_DEVICE_ID"):
        monkeypatch.setenv(name, "0")
    rank = GpuRank(Place(0, 1, 0, 1, 0, "127.0.0.1", 1, "cuda", 1.0, ""))
    rank.world = World(launcher="selftest", device=torch.device("cuda", 0))
    assert _said_by(rank.rendering).startswith(said)
