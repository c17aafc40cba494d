"""What a process may use, from made-up /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ddpshim.process import machine
from tests.preloaded_commands import python

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
    "v2, the smallest quota on the way up": (V2, 3.5, (10 * GB, 16 * GB)),
    "v2 without limits": (
        {**V2, "sys/fs/cgroup/job/memory.max": "max\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"},
        8.0,
        (48_000_000 * 1024, None),
    ),
    "v1": (V1, 2.0, (614_400, None)),
    "v1 without a quota": (
        {**V1, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"},
        None,
        (614_400, None),
    ),
    "neither proc nor sys": ({}, None, (None, None)),
}


@pytest.mark.parametrize(("files", "quota", "memory"), TREES.values(), ids=TREES)
def test_what_a_process_may_use(
    files: dict[str, str], quota: Any, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert machine.core_quota() == quota
    assert machine.memory() == memory


def test_the_number_of_processes_that_compute_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, quota, num in ((16, 3.5, 3), (16, 0.5, 1), (16, None, 16), (1, 3.5, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, allowed=allowed: set(range(allowed)))
        monkeypatch.setattr(machine, "core_quota", lambda quota=quota: quota)
        assert machine.num_cores() == num


_STEPS = """
import os, resource
from ddpshim.job.process_group import keep_freed_memory
for _ in range(2):
    kept = keep_freed_memory()
    os.environ.pop("MALLOC_ARENA_MAX", None)
    for step in range(6):
        if step == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [bytearray(8 * 2**20) for _ in range(10)]
        del tensors
    print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.ranks
def test_memory_that_a_step_has_freed_is_there_for_the_next_one() -> None:
    pages = 3 * 10 * 8 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        pytest.skip("this malloc is not glibc's")
    said = python("-c", _STEPS, environ={"PYTHONPATH": str(Path(__file__).parents[2]), "MALLOC_ARENA_MAX": "8"})
    (users, given), (kept, faults) = map(str.split, said.splitlines())
    assert users == "False", "the user has settings of his own"
    assert int(given) > pages / 10
    assert kept == "True"
    assert int(faults) < pages / 100
