"""Describes versions, GPUs, launcher and machine for a bug report, without names of machines and users."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import socket
from importlib import metadata
from typing import Any, Callable

from ddpshim import adapters
from ddpshim.errors import LaunchError
from ddpshim.process import machine
from ddpshim.process.launch_env import read_launch_env
from ddpshim.process.say import size
from ddpshim.version import __version__

_PACKAGES = ("robomimic", "robosuite", "mujoco", "diffusers", "h5py")


def for_bug_report() -> str:
    """Return what torch says about this environment, and three lines, without names. Local; starts pip and others.

    In place of what cannot be determined it has the reason.
    """
    versions = {"ddpshim": __version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    patches = "".join(f"; {name} patch: {state}" for name, state in _patch_states().items())
    options = " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if re.match("DDPSHIM_|NCCL_|OMP_NUM_T", k))
    lines = [
        _found(lambda: importlib.import_module("torch.utils.collect_env").get_pretty_env_info()),
        "",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + patches,
        f"launch: {_found(_launch)}; {options or 'no variables'}",
        f"machine: {_found(_machine)}",
    ]
    return without_names("\n".join(lines))


def without_names(text: str) -> str:
    """Return `text` without the names of this machine, the main rank's and the user, and without passwords. Local."""
    user = os.environ.get("LOGNAME", os.environ.get("USER", ""))
    host, master = socket.gethostname(), os.environ.get("MASTER_ADDR", "")
    hidden = {os.path.expanduser("~"): "<home>", user: "<user>", **dict.fromkeys((host, host.split(".")[0]), "<host>")}
    hidden.update({master: "<host>"} if not re.fullmatch(r"localhost|127(\.\d+){3}|::1", master) else {})
    # The longest first, because one may contain another. Shorter ones also occur inside ordinary words.
    for name in sorted(hidden, key=len, reverse=True):
        if len(name) > 2 and name not in ("root", "/root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", hidden[name], text)
    text = re.sub(r"(?i)(\w*(KEY|TOKEN|PASS|SECRET|CREDENTIAL|AUTH)\w*=)\S+", r"\1<secret>", text)
    return re.sub(r"//[^/@\s]+@", "//<user>@", text)


def _found(section: Callable[[], Any]) -> Any:
    """Return `section()`, or its error as text: drivers and containers raise errors of any type."""
    try:
        return section()
    except Exception as error:
        return f"unknown: {type(error).__name__}: {error}"


def _patch_states() -> dict[str, str]:
    """Return, for each codebase whose adapter has patches, whether the installed files are patched."""
    asked = {package: adapters.function(package, "state_of_files") for package in adapters.packages()}
    return {package: _found(state) for package, state in asked.items() if state is not None}


def _launch() -> str:
    try:
        env = read_launch_env(os.environ)
    except LaunchError as error:
        return f"refused: {error}"
    place = f"rank {env.rank} of {env.world_size}, local rank {env.local_rank} of {env.local_world_size}"
    return f"{place}, by {env.launcher} ({env.reason})"


def _machine() -> str:
    memory = machine.memory()
    of = "unknown memory" if memory.available_bytes is None else f"{size(memory.available_bytes)} of memory free"
    return f"{machine.num_cores()} cores usable of {os.cpu_count()}, {of}"
