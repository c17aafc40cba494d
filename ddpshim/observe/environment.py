"""Describes the machine and its packages for a bug report, by default without names of machines and users."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import platform
import re
import socket
import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Optional

from ddpshim import adapters
from ddpshim.errors import LaunchError
from ddpshim.observe.report.words import shown
from ddpshim.process import machine
from ddpshim.process.launch_env import read_launch_env
from ddpshim.process.schedulers import expand_nodelist
from ddpshim.version import __version__

_PACKAGES = ("robomimic", "robosuite", "mujoco", "diffusers", "numpy", "h5py")
_RELEVANT = re.compile(
    r"(LOCAL_|GROUP_|NODE_|ROLE_)?RANK|(LOCAL_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|SLURM_(JOB_ID|JOBID|STEP_ID|STEPID|PROCID|LOCALID|NODEID|PTY_PORT|JOB_NUM_NODES|N?NODES|N?TASKS|NPROCS"
    r"|STEP_NUM_TASKS|STEP_NUM_NODES|STEP_TASKS_PER_NODE|(N?TASKS|GPUS|CPUS|MEM)_(PER|ON)_\w+|GPUS|CPU_BIND|GPU_BIND"
    r"|(STEP_|JOB_)?NODELIST|STEP_GPUS|JOB_GPUS)"
    r"|(OMPI_COMM_WORLD|MV2_COMM_WORLD)_\w+|OMPI_MCA_\w*(btl|oob|bind|ess_base)\w*|PMI_\w+|PMIX_(RANK|NAMESPACE)"
    r"|MPI_LOCAL\w+|(DDPSHIM|NCCL|GLOO|TORCH|TORCHELASTIC|PYTORCH|CUDA|NVIDIA|HIP|ROCR|OMP|MKL|OPENBLAS|KMP|GOMP)_\w+"
    r"|(MUJOCO|PYOPENGL|EGL|HDF5|UCX|FI)_\w+|LD_PRELOAD|LD_LIBRARY_PATH|PYTHON\w+"
)
_SECRET = re.compile(r"KEY|TOKEN|PASS|SECRET|CREDENTIAL|AUTH", re.IGNORECASE)
_NAMES_MACHINES = re.compile(r"MASTER_ADDR|HOST(NAME)?|SLURM\w*_(NODELIST|NODENAME|\w*HOST|\w*IPADDR)|SLURMD_NODENAME")
_LOOPBACK = re.compile(r"localhost|127(\.[0-9]+){3}|::1")


def describe(with_names: bool = False) -> dict[str, Any]:
    """Return versions, GPUs, launcher, variables and machine, by section, as JSON types. Local; starts no group.

    Imports torch, but no other package whose version it reports. The value of a section that cannot be determined is
    the reason, so that recording it cannot end a training. With `with_names` False (for public reports) the names of
    machines and of the user and the home folder are replaced, wherever they occur. Variables whose names look like
    secrets are always left out.
    """
    relevant = (name for name in sorted(os.environ) if _RELEVANT.fullmatch(name) and not _SECRET.search(name))
    report: dict[str, Any] = {
        "versions": _found(_versions),
        **_patch_states(),
        "GPUs": _found(_gpus),
        "launch": _found(_launch),
        "variables": {name: os.environ[name] for name in relevant},
        "machine": _found(lambda: {**_machine(), **({"host": socket.gethostname()} if with_names else {})}),
    }
    hidden = {} if with_names else _private(os.environ)
    return {section: _without(hidden, content) for section, content in report.items()}


def without_names(text: str) -> str:
    """Return `text` with the names of machines and of the user and the home folder replaced. Local."""
    return str(_without(_private(os.environ), text))


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report of :func:`describe` as readable text."""
    lines = []
    for section, content in report.items():
        if isinstance(content, Mapping):
            lines.append(f"{section}:" if content else f"{section}: none")
            width = max(map(len, content), default=0)
            lines += [f"  {name:{width}}  {shown(value)}" for name, value in content.items()]
        else:
            lines.append(f"{section}: {shown(content)}")
    return "\n".join(lines)


def _found(section: Callable[[], Any]) -> Any:
    """Return `section()`, or its error as text: drivers and containers raise errors of any type."""
    try:
        return section()
    except Exception as error:
        return f"unknown: {type(error).__name__}: {error}"


def _versions() -> dict[str, Optional[str]]:
    here = platform.uname()  # platform.platform() starts a process to find the processor's name
    versions: dict[str, Optional[str]] = {
        "ddpshim": __version__,
        "Python": f"{platform.python_version()} ({sys.implementation.name})",
        "system": "-".join([here.system, here.release, here.machine, "with", "".join(platform.libc_ver())]),
        **_torch_versions(),
    }
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found = importlib.util.find_spec(package) is not None
            versions[package] = "a source tree, version unknown" if found else None
    return versions


def _torch_versions() -> dict[str, Optional[str]]:
    try:
        import torch
    except (ImportError, OSError) as error:  # probably the bug that is reported
        return {"torch": f"cannot be imported: {error}"}
    versions: dict[str, Optional[str]] = {"torch": str(torch.__version__), "CUDA": torch.version.cuda}
    if torch.version.hip is not None:
        versions["ROCm"] = torch.version.hip
    has_cudnn = torch.version.cuda is not None and torch.backends.cudnn.is_available()
    versions["cuDNN"] = str(torch.backends.cudnn.version()) if has_cudnn else None
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        found = re.search(r"\d+\.\d+(\.\d+)?", driver.read_text())
        versions["NVIDIA driver"] = found[0] if found else None
    return versions


def _patch_states() -> dict[str, str]:
    """Return, for each codebase whose adapter has patches, whether the installed files are patched."""
    asked = {package: adapters.function(package, "state_of_files") for package in adapters.packages()}
    return {f"{package} patch": _found(state) for package, state in asked.items() if state is not None}


def _gpus() -> Any:
    """Describe each GPU, and the GPUs whose memory it can access. Only queries the driver; allocates nothing."""
    try:
        import torch
    except (ImportError, OSError):
        return "unknown without torch"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if not torch.cuda.is_available():
            why = "; ".join(str(warning.message).splitlines()[0] for warning in warned)
            return f"torch sees none{f': {why}' if why else ''}"
    num_gpus = torch.cuda.device_count()
    gpus = {}
    for index in range(num_gpus):
        at = torch.cuda.get_device_properties(index)
        peers = [i for i in range(num_gpus) if i != index and torch.cuda.can_device_access_peer(index, i)]
        gpus[f"cuda:{index}"] = (
            f"{at.name}, {_size(at.total_memory)}, compute capability {at.major}.{at.minor}, "
            f"reaches the memory of {', '.join(f'cuda:{peer}' for peer in peers) or 'no other'}"
        )
    return gpus


def _launch() -> dict[str, Any]:
    try:
        env = read_launch_env(os.environ)
    except LaunchError as error:
        return {"refused": str(error)}
    place = f"rank {env.rank} of {env.world_size}, local rank {env.local_rank} of {env.local_world_size}"
    master = f"{env.master_addr}:{env.master_port}" if env.master_addr is not None else None
    return {"launcher": env.launcher, "because": env.reason, "place": place, "master": master}


def _machine() -> dict[str, Any]:
    memory, shared, limits = machine.memory(), machine.shared_memory(), machine.limits()
    quota, nodes = machine.core_quota(), machine.numa_nodes()
    return {
        "cores": f"{machine.num_cores()} usable of {os.cpu_count()} "
        f"(affinity {len(machine.cores())}, quota {'none' if quota is None else f'{quota:g}'})",
        "NUMA nodes": "unknown" if nodes is None else {str(node): listed for node, listed in nodes.items()},
        "memory": f"{_size(memory.total_bytes)}, available {_size(memory.available_bytes)}, "
        f"container's limit {'none' if memory.limit_bytes is None else _size(memory.limit_bytes)}",
        "shared memory": "unknown" if shared is None else f"{_size(shared[0])}, free {_size(shared[1])}",
        "limits": "unknown" if limits is None else {name: "none" if n is None else n for name, n in limits.items()},
    }


def _private(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the texts to hide and their replacements, the longest first, because one may contain another."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container may run under a user id without a name
        user = ""
    machines = {socket.gethostname(), socket.gethostname().split(".")[0]}
    for value in (environ[name] for name in environ if _NAMES_MACHINES.fullmatch(name)):
        machines.add(value)
        with contextlib.suppress(LaunchError):
            machines.update(expand_nodelist(value))
    hidden = {**dict.fromkeys(machines, "<host>"), user: "<user>", os.path.expanduser("~"): "<home>"}
    # Shorter texts also occur inside ordinary words and numbers, and identify nobody.
    kept = [text for text in hidden if len(text) < 3 or text in ("root", "localhost") or _LOOPBACK.fullmatch(text)]
    return {text: hidden[text] for text in sorted(hidden, key=len, reverse=True) if text not in kept}


def _without(hidden: Mapping[str, str], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without(hidden, item) for name, item in value.items()}
    if isinstance(value, str):
        for text, stand_in in hidden.items():
            value = re.sub(rf"(?<![\w-]){re.escape(text)}(?![\w-])", stand_in, value)
        return re.sub(r"//[^/@\s]+@", "//<user>@", value)
    return value


def _size(num_bytes: Optional[int]) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"
