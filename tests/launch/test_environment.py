"""`python -m ddpshim selftest --env`: what is in the report, and what must not be."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

import ddpshim
from ddpshim.__main__ import main
from ddpshim.process import machine
from ddpshim.robomimic import adapter
from ddpshim.tools import selftest
from ddpshim.tools.selftest import for_bug_report, without_names
from ddpshim.trainers import patching, patching_in_memory


def test_it_has_torchs_words_and_three_lines(
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
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "launch: refused: RANK" in for_bug_report()


def test_secrets_are_left_out_and_names_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {
        "NCCL_API_KEY": "hunter2",
        "DDPSHIM_PASSWORD": "hunter2",
        "DDPSHIM_CACHE": "/home/alice/cache/alice.d //alice:hunter2@server/cuda",
        "HOME": "/home/alice",
        "LOGNAME": "alice",
        "NCCL_DEBUG_FILE": "/tmp/login7.log",
        "NCCL_SOCKET_IFNAME": "ib0",
        "MASTER_ADDR": "secretgpu01",
    }
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "login7.cluster")
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "at secretgpu01, of alice on login7")
    text = for_bug_report()
    for private in ("hunter2", "secretgpu", "alice", "login7"):
        assert private not in text
    assert "at <host>, of <user> on <host>" in text
    assert "DDPSHIM_CACHE=<home>/cache/<user>.d //<user>@server/cuda" in text
    assert "NCCL_DEBUG_FILE=/tmp/<host>.log NCCL_SOCKET_IFNAME=ib0" in text
    assert without_names("malice") == "malice"


def test_what_cannot_be_found_out_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", fail)
    monkeypatch.setattr(machine, "memory", fail)
    torchs, *_, last = for_bug_report().splitlines()
    assert torchs == last.partition("machine: ")[2] == "unknown: RuntimeError: CUDA error: invalid device ordinal"


def test_an_unedited_run_is_reported_as_patched_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(state="not applied", patch_set=SimpleNamespace(name="robomimic/0.3.0"))
    monkeypatch.setattr(patching, "status", lambda package: found)
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda package: found)
    released = "files as released (robomimic/0.3.0); a launched training is patched in memory"
    assert adapter.state_of_files() == released
    for package, state in (("robomimic", "in memory: robomimic/0.3.0"), ("another", released)):
        finder = patching_in_memory.PatchedFiles(
            patching_in_memory.Patched("robomimic/0.3.0", {f"{package}.algo": b""}, ())
        )
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr("sys.meta_path", [finder, *__import__("sys").meta_path])
            assert selftest._patch_states()["robomimic"] == state
    found.state = "applied"
    assert adapter.state_of_files() == "applied (robomimic/0.3.0)"
