"""Checks whether this machine can resolve the job's master address, and whether rank 0 can serve its port."""

from __future__ import annotations

import os
import socket
import time
from typing import Optional

from ddpshim.errors import LaunchError
from ddpshim.process.launch_env import LaunchEnv

_NAME_SERVER_S = 5.0  # for a name server that does not answer at once
_LOOPBACK = "lo"  # Linux's name


def stay_on_this_machine() -> None:
    """Make the gloo groups of this process's children listen on loopback, unless GLOO_SOCKET_IFNAME is set. Local."""
    if _LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)


def why_unknown(host: str) -> Optional[Exception]:
    """Return the error for a host name that this machine cannot resolve; None if it can. Local.

    torch would retry until its timeout, half an hour.
    """
    end = time.monotonic() + _NAME_SERVER_S
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return None
        except (OSError, UnicodeError) as error:  # the latter: a part of the name is empty or too long
            if getattr(error, "errno", None) != socket.EAI_AGAIN or time.monotonic() > end:
                return error
        time.sleep(0.5)


def check_name(env: LaunchEnv) -> None:
    """Raise LaunchError if ``master_addr`` does not resolve on this machine. Local."""
    error = None if env.master_addr is None else why_unknown(env.master_addr)
    if error is not None:
        raise LaunchError(
            f"MASTER_ADDR={env.master_addr!r} does not resolve on this machine, {socket.gethostname()} ({error}): "
            f"rank {env.rank} could not reach the others. Use a name or IP address of rank 0's machine that resolves "
            "on all nodes."
        ) from error


def check_port(env: LaunchEnv) -> None:
    """Check that rank 0 can serve ``master_port``, if it must. Local: briefly binds a socket on rank 0.

    Raises LaunchError if this process must serve the port and it is in use, or privileged.
    """
    if env.rank != 0 or env.world_size == 1 or env.agent_store or env.master_port is None:
        return
    try:
        with socket.socket() as probe:
            # As torch does: a port in TIME_WAIT is free. Never listen: a rank that connected already would be cut off.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", env.master_port))
    except OSError as error:
        raise LaunchError(
            f"MASTER_PORT={env.master_port} of MASTER_ADDR={env.master_addr!r} cannot be served ({error.strerror}): "
            "ranks would fail, or connect to another program and hang. Set MASTER_PORT to a free port (torchrun: "
            "--master-port, or --standalone)."
        ) from error
