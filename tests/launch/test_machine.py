"""What a process may use, from made-up /proc and /sys trees; and the line of advice on workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ddpshim
from ddpshim.process import machine
from tests.ranks import run_ranks

GB = 10**9


V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/0123abc\n4:memory:/a\n0::/\n",  # the path is not seen in the container
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:   600 kB\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",  # no limit
}
V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
    "sys/fs/cgroup/job/cpu.max": "350000 100000\n",
    "sys/fs/cgroup/cpu.max": "800000 100000\n",
    "proc/meminfo": "MemTotal:       64000000 kB\nMemFree: 1 kB\nMemAvailable:   48000000 kB\n",
    "sys/fs/cgroup/job/memory.max": f"{16 * GB}\n",
    "sys/fs/cgroup/job/memory.current": f"{10 * GB}\n",
    "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {4 * GB}\nactive_file 7\n",
}
TREES: dict[str, Any] = {
    "v2, the smallest quota on the way up": (V2, 3.5, (64_000_000 * 1024, 10 * GB, 16 * GB)),
    "v2 without limits": (
        {**V2, "sys/fs/cgroup/job/memory.max": "max\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"},
        8.0,
        (64_000_000 * 1024, 48_000_000 * 1024, None),
    ),
    "v1": (V1, 2.0, (1_024_000, 614_400, None)),
    "v1 without a quota": (
        {**V1, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"},
        None,
        (1_024_000, 614_400, None),
    ),
    "neither proc nor sys": ({}, None, (None, None, None)),
}


@pytest.mark.parametrize(("files", "quota", "memory"), TREES.values(), ids=TREES)
def test_what_a_process_may_use(
    files: dict[str, str], quota: Any, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.delattr(os, "sysconf")  # as on a system that says nothing
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert machine.core_quota() == quota
    assert machine.memory() == memory


def test_the_number_of_processes_that_compute_at_once() -> None:
    cores, quotas = frozenset(range(16)), (3.5, 0.5, None)
    assert [machine.num_usable(cores, quota) for quota in quotas] == [3, 1, 16]
    assert machine.num_usable(frozenset({5}), 3.5) == 1


def _what_a_loader_says(num_cores: int, is_bound: bool) -> str:
    import contextlib
    import io

    import torch
    from torch.utils.data import TensorDataset

    # Not of a machine's real cores: torch has a warning of its own about more workers than these.
    machine.core_quota = lambda: float(num_cores)  # type: ignore[assignment]
    machine.cores = lambda: frozenset(range((os.cpu_count() or 1) + is_bound))  # type: ignore[assignment]
    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        for _ in range(2):
            ddpshim.make_loader(TensorDataset(torch.arange(8)), batch_size=4, num_workers=1)
    return out.getvalue()


@pytest.mark.ranks
def test_make_loader_advises_once_and_on_the_main_rank() -> None:
    main, other = run_ranks(_what_a_loader_says, 2, 1, False)
    assert main.count("2 ranks x 1 worker on 1 core: 4 processes compete for cores") == 1
    assert "use num_workers=0" in main
    assert other == ""
    assert "compete" not in run_ranks(_what_a_loader_says, 2, 2, True)[0], "each may have two cores of its own"


_STEPS = """
import os, resource
from ddpshim.job.process_group import keep_freed_memory
kept = keep_freed_memory()
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
