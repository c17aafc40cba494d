"""What a process may use, from made-up /proc and /sys trees; and the one line of advice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ddpshim
from ddpshim.data import advice
from ddpshim.data.advice import Share
from ddpshim.process import machine, say
from tests.ranks import run_ranks

GB = 10**9


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_quota_of_cgroup_v2_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
        "sys/fs/cgroup/job/cpu.max": "350000 100000\n",
        "sys/fs/cgroup/cpu.max": "800000 100000\n",
    }
    assert machine.core_quota(_tree(tmp_path, files)) == 3.5
    assert machine.num_usable(frozenset(range(16)), 3.5) == 3
    assert machine.num_usable(frozenset({5}), 3.5) == 1
    assert machine.num_usable(frozenset(range(16)), 0.5) == 1
    assert machine.num_usable(frozenset(range(16)), None) == 16


def test_quota_of_cgroup_v1_in_a_container_that_does_not_see_its_own_path(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/0123abc\n4:memory:/docker/0123abc\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert machine.core_quota(_tree(tmp_path, files)) == 2.0
    _tree(tmp_path, {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"})
    assert machine.core_quota(tmp_path) is None


def test_memory_is_what_the_container_leaves(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:       64000000 kB\nMemFree: 1 kB\nMemAvailable:   48000000 kB\n",
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/memory.max": f"{16 * GB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{10 * GB}\n",
        "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {4 * GB}\nactive_file 7\n",
    }
    found = machine.memory(_tree(tmp_path, files))
    assert found == (64_000_000 * 1024, 10 * GB, 16 * GB)
    _tree(tmp_path, {"sys/fs/cgroup/pod/memory.max": "max\n"})
    assert machine.memory(tmp_path) == (64_000_000 * 1024, 48_000_000 * 1024, None)


def test_memory_of_cgroup_v1_whose_limit_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:   600 kB\n",
        "proc/self/cgroup": "4:memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert machine.memory(_tree(tmp_path, files)) == (1_024_000, 614_400, None)


def test_a_system_without_proc_and_sys(tmp_path: Path) -> None:
    assert machine.core_quota(tmp_path) is None
    assert machine.memory(tmp_path) == (None, None, None)


def _shares(num_ranks: int, num_workers: int, cores: Any, quota: Any = None, host: str = "a") -> list[Share]:
    return [Share(host, 64, frozenset(cores), quota, num_workers)] * num_ranks


def test_advice_on_workers_names_the_number_that_fits() -> None:
    line = advice.on_workers(_shares(4, 8, range(16)))
    assert line is not None
    assert line.startswith("4 ranks x 8 workers on 16 cores (of the machine's 64; ")
    assert "36 processes" in line
    assert "use num_workers=3 (" in line
    assert advice.on_workers(_shares(4, 3, range(16))) is None
    assert advice.on_workers(_shares(4, 4, range(16))) is not None


def test_advice_on_workers_counts_what_ranks_share() -> None:
    # Bound to four cores each: 16 in all, enough for 4 x (1 + 3).
    bound = [Share("a", 16, frozenset(range(4 * rank, 4 * rank + 4)), None, 3) for rank in range(4)]
    assert advice.on_workers(bound) is None
    assert "on 2 cores" in str(advice.on_workers([Share("a", 16, frozenset({rank}), None, 3) for rank in range(2)]))
    assert "on 4 cores" in str(advice.on_workers(_shares(4, 3, range(16), quota=4.5)))
    # Another node's ranks take nothing from this one.
    assert advice.on_workers(_shares(4, 3, range(16)) + _shares(4, 3, range(16), host="b")) is None
    # More ranks than cores, and no workers to take away.
    assert advice.on_workers(_shares(4, 0, range(2))) is None


def test_advice_is_said_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    say.say_once.cache_clear()
    for line in ("one", "one", None, "two"):
        advice.give(line)
    assert capsys.readouterr().err == "ddpshim: one\nddpshim: two\n"


def _what_a_loader_says() -> str:
    import contextlib
    import io

    import torch
    from torch.utils.data import TensorDataset

    # Not of a machine's real cores: torch has a warning of its own about more workers than these.
    machine.core_quota = lambda: 1.0  # type: ignore[assignment]
    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        for _ in range(2):
            ddpshim.make_loader(TensorDataset(torch.arange(8)), batch_size=4, num_workers=1)
    return out.getvalue()


@pytest.mark.ranks
def test_make_loader_advises_once_and_on_the_main_rank() -> None:
    main, other = run_ranks(_what_a_loader_says, 2)
    assert main.count("2 ranks x 1 worker on 1 core") == 1
    assert "use num_workers=0" in main
    assert other == ""


_STEPS = """
import os, resource
from ddpshim.job.process_group import keep_freed_memory
kept = keep_freed_memory(os.environ)
for step in range(6):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [bytearray(8 * 2**20) for _ in range(10)]
    del tensors
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _steps(**environ: str) -> tuple[str, int]:
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", _STEPS]
    out = subprocess.run(command, env={**path, **environ}, capture_output=True, text=True, check=True, timeout=60)
    kept, faults = out.stdout.split()
    return kept, int(faults)


@pytest.mark.ranks
def test_memory_that_a_step_has_freed_is_there_for_the_next_one() -> None:
    pages = 3 * 10 * 8 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        pytest.skip("this malloc is not glibc's")
    kept, faults = _steps()
    assert kept == "True"
    assert faults < pages / 100
    kept, faults = _steps(MALLOC_ARENA_MAX="8")
    assert kept == "False", "the user has settings of his own"
    assert faults > pages / 10
