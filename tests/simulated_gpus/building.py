"""Compiles the simulated GPUs once for each torch and each state of their sources."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Optional

from tests.preloaded_commands import patience

TORCH = "2.13."  # the one whose inner classes the sources know
_HERE = Path(__file__).parent
_SOURCES = ("simulated.h", "device.cpp", "python.cpp", "building.py")
_DEADLINE_S = 400
LIBRARY = "simulated_gpus_c.so"


@functools.cache
def built() -> tuple[Optional[Path], Optional[str]]:
    """The folder of the library, or None and why there is none."""
    given = os.environ.get("SIMULATED_GPUS_LIBRARY")
    if given:
        return Path(given), None
    version = importlib.metadata.version("torch")
    torch = importlib.util.find_spec("torch")
    if not version.startswith(TORCH):
        return None, f"they are written for torch {TORCH}x, and this is {version}"
    if torch is None or not torch.submodule_search_locations:
        return None, "torch is not a folder"
    root = Path(torch.submodule_search_locations[0])
    if (root / "lib" / "libtorch_cuda.so").exists():
        return None, f"torch {version} was built for CUDA: they are for a build for the CPU alone"
    headers = [root / "include" / "ATen" / "ATen.h", Path(sysconfig.get_path("include")) / "Python.h"]
    missing = [str(header.name) for header in headers if not header.exists()]
    if missing or sys.platform != "linux":
        return None, f"{' and '.join(missing) or 'Linux'} lacks here"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None, "there is no g++"
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [(_HERE / name).read_text() for name in _SOURCES]
    digest = hashlib.sha256("\0".join([version, str(root), sys.version, said, *texts]).encode()).hexdigest()[:16]
    folder = _cache() / f"torch-{version}-{digest}"
    with folder.with_name(f"{folder.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (folder / LIBRARY).exists():
            reason = _build(compiler, root, folder)
            if reason is not None:
                return None, reason
    return folder, None


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in (Path(base) / "ddpshim-tests", Path(tempfile.gettempdir()) / f"ddpshim-tests-{os.getuid()}"):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise RuntimeError("neither the user's cache nor the folder for temporary files can be written")


def _build(compiler: str, torch: Path, folder: Path) -> Optional[str]:
    """Compile the library into `folder`; why that failed."""
    include = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    out = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    # In one go: torch's headers take the compiler longer than all that is here.
    (out / "all.cpp").write_text("".join(f'#include "{_HERE / name}"\n' for name in _SOURCES if name.endswith(".cpp")))
    command = ["nice", "-n", "10", compiler, "-shared", "-fPIC", "-std=c++20", "-O1", "-w"]
    command += ["-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED", *(word for path in include for word in ("-isystem", str(path)))]
    command += [str(out / "all.cpp"), f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    command += ["-lc10", "-ltorch_cpu", "-ltorch_python", "-o", str(out / LIBRARY)]
    limit_s = patience(_DEADLINE_S)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"the compiler was busy for {limit_s:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"they do not compile: {next((line for line in lines if 'error' in line), lines[-1] if lines else '?')}"
    out.rename(folder)
    return None
