"""Measures the cores, memory and limits that this process has, including a container's.

All is local, reads a few small files, and is None if the system does not say (macOS, Windows).
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Optional

_ROOT = Path("/")


class MainMemory(NamedTuple):
    """Bytes of main memory."""

    available_bytes: Optional[int]  # without swapping, and without reaching the limit
    limit_bytes: Optional[int]  # of this process's containers, if below the machine's memory


def core_quota() -> Optional[float]:
    """Return a container's limit of CPU time for all its processes together, in cores; None without a limit."""
    quotas = []
    for folder in _cgroups("cpu"):
        of_v2 = (_read(folder / "cpu.max") or "").split()
        of_v1 = (_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))
        quota, period = map(_number, of_v2 if len(of_v2) == 2 else of_v1)  # v2 says "max", v1 -1, for no quota
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def num_cores() -> int:
    """Return the number of cores that this process can use, at least 1, given its quota and its affinity.

    A launcher may bind each rank to its own cores.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(allowed, core_quota() or math.inf)))


def resident_bytes() -> tuple[Optional[int], Optional[int]]:
    """Return this process's resident memory now, and its peak, in bytes."""
    now = (_read(_ROOT / "proc/self/statm") or "").split()
    try:
        import resource
    except ImportError:  # not POSIX
        return None, None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    most = peak if sys.platform == "darwin" else peak * 1024
    return int(now[1]) * resource.getpagesize() if len(now) > 1 else None, most


def memory() -> MainMemory:
    """Return the machine's memory, and how much of it this process can use."""
    stated = re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB", _read(_ROOT / "proc/meminfo") or "", re.MULTILINE)
    sizes = {name: int(number) * 1024 for name, number in stated}
    available, limit = sizes.get("MemAvailable"), None
    for folder in _cgroups("memory"):
        most = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
        if most is None or most >= sizes.get("MemTotal", math.inf):
            continue
        used = _number(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")) or 0
        # Cached files count as used, but are dropped when memory is needed.
        cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(folder / "memory.stat") or "", re.MULTILINE)
        left = max(0, most - used + (int(cached[1]) if cached else 0))
        limit = most if limit is None else min(limit, most)
        available = left if available is None else min(available, left)
    return MainMemory(available, limit)


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its parents, v1 and v2; they may not exist.

    In a container the group is often mounted at the top, while the path that the system gives is valid outside only:
    hence all folders up to the mount.
    """
    base = _ROOT / "sys/fs/cgroup"
    for line in (_read(_ROOT / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in (base / controllers, base / controller) if controllers else (base, base / "unified"):
            folder = mount / path.strip("/")
            while folder != mount:
                yield folder
                folder = folder.parent
            yield mount


def _read(path: Path) -> Optional[str]:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(text: Optional[str]) -> Optional[int]:
    return int(text) if text is not None and re.fullmatch(r"[0-9]+", text) else None
