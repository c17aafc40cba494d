"""Connects the ranks to the job's key-value store, in which each registers; reads and writes it without waiting."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any, Callable, Optional, TypeVar, Union

from ddpshim.errors import LaunchError
from ddpshim.process.job import current
from ddpshim.process.launch_env import LaunchEnv
from ddpshim.process.say import ranks_called

T = TypeVar("T")

_DEADLINE_S = 5.0
_NAME_SERVER_S = 5.0  # for a name server that does not answer at once
_LOOPBACK = "lo"  # Linux's name


_stores: dict[tuple[Any, ...], Any] = {}  # by address; kept after `cleanup()`: a server must outlive its clients


def is_there(store: Any, key: str) -> bool:
    """Return whether `store` holds `key`. Local."""
    with contextlib.suppress(RuntimeError, ValueError):
        if hasattr(store, "check"):
            return bool(store.check([key]))
        store.wait([key], timedelta(seconds=0.1))  # torch 2.1 has no check(); a late answer counts as no
        return True
    return False


def claim(store: Any, key: str, value: str) -> str:
    """Set `key` of `store` to `value` unless another process has set it; returns the value it then holds. Local."""
    # Not by compare_set, which torch before 2.4 does without Python's lock (GIL): that crashes Python.
    if store.add(f"{key}/claims", 1) == 1:
        store.set(key, value)
    return str(store.get(key).decode(errors="replace"))  # waits until the first process has set it


def ask_store(ask: Callable[[Any], T]) -> Optional[T]:
    """Return `ask(store)`; None without a store, or if the process that serves it has ended."""
    if (watched := current().watched) is not None:
        with contextlib.suppress(RuntimeError, ValueError):
            watched.store.set_timeout(timedelta(seconds=_DEADLINE_S))
            return ask(watched.store)
    return None


def first_failure() -> Optional[int]:
    """Return the rank that failed first; None if none has reported a failure. Local; safe in any thread."""
    claimed = ask_store(lambda store: store.get("first_failure") if is_there(store, "first_failure") else None)
    return None if claimed is None else rank_in(claimed)


def rank_in(claimed: Union[str, bytes]) -> Optional[int]:
    """Return the rank in `claimed`; None if no rank wrote it: any process that reaches the store can write to it."""
    text = claimed if isinstance(claimed, str) else claimed.decode(errors="replace")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def stay_on_this_machine() -> None:
    """Make the gloo groups of this process's children listen on loopback, unless GLOO_SOCKET_IFNAME is set. Local."""
    if _LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)


def check_address(env: LaunchEnv) -> None:
    """Raise LaunchError if ``master_addr`` does not resolve here, or if rank 0 cannot serve ``master_port``.

    Local: briefly binds a socket on rank 0, if this process must serve the port.
    """
    end = time.monotonic() + _NAME_SERVER_S
    while env.master_addr is not None:
        try:
            socket.getaddrinfo(env.master_addr, None, type=socket.SOCK_STREAM)
            break
        except (OSError, UnicodeError) as error:  # the latter: a part of the name is empty or too long
            if getattr(error, "errno", None) != socket.EAI_AGAIN or time.monotonic() > end:
                raise LaunchError(  # torch would retry for half an hour
                    f"MASTER_ADDR={env.master_addr!r} does not resolve on this machine, {socket.gethostname()} "
                    f"({error}): rank {env.rank} could not reach the others. Use a name or IP address of rank 0's "
                    "machine that resolves on all nodes."
                ) from error
        time.sleep(0.5)
    if env.rank != 0 or env.world_size == 1 or env.agent_store or env.master_port is None:
        return
    try:
        with socket.socket() as probe:
            # As torch does: a port in TIME_WAIT is free. Never listen: a rank that connected already would be cut off.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", env.master_port))
    except OSError as taken:
        raise LaunchError(
            f"MASTER_PORT={env.master_port} of MASTER_ADDR={env.master_addr!r} cannot be served ({taken.strerror}): "
            "ranks would fail, or connect to another program and hang. Set MASTER_PORT to a free port (torchrun: "
            "--master-port, or --standalone)."
        ) from taken


def meet(env: LaunchEnv, prefix: str, timeout_s: float) -> Any:
    """Return a store that all ranks of the job have joined, under `prefix` (collective).

    Raises LaunchError if the address is unknown or does not answer, ranks are missing, or ranks have different world
    sizes.
    """
    import torch.distributed as dist  # in functions: `run` checks addresses without torch

    store = dist.PrefixStore(prefix, _root_store(env, timedelta(seconds=timeout_s)))
    store.set(f"here/{env.rank}", socket.gethostname())
    num_here, me = store.add("here", 1), f"WORLD_SIZE={env.world_size} on rank {env.rank}"
    first = claim(store, "first", me)
    if first.partition(" ")[0] != me.partition(" ")[0]:
        # All ranks wait for this key, so that those that joined before get the error too.
        store.set("complete", f"{first}, but {me}: they would wait for different ranks")
    elif num_here == env.world_size:
        store.set("complete", "")
    try:
        store.wait(["complete"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [rank for rank in range(env.world_size) if not is_there(store, f"here/{rank}")]
        ranks = f"{ranks_called(missing)} {'are' if missing[1:] else 'is'} missing"
        raise LaunchError(
            f"{env.world_size - len(missing)} of {env.world_size} ranks joined within {timeout_s:g} s; {ranks}, and "
            "the others cannot train without them. Check why they did not start, or wait longer (DDPSHIM_TIMEOUT_S)."
        ) from error
    wrong = store.get("complete").decode(errors="replace")
    if wrong:
        raise LaunchError(f"{wrong}. Start every rank with the same number of ranks.")
    return store


def _root_store(env: LaunchEnv, timeout: timedelta) -> Any:
    """Return the store through which the ranks of this job find each other; the same one again after `cleanup`."""
    import torch.distributed as dist

    if env.world_size == 1 and not env.agent_store:
        return dist.HashStore()  # a single rank needs no port
    address = (env.master_addr, env.master_port, env.rank, env.world_size)
    if address not in _stores:
        check_address(env)
        where = str(env.master_addr), int(env.master_port or 0)
        serves = env.rank == 0 and not env.agent_store
        try:
            # Not torch's "tcp://": under torchrun that makes every rank a client of a port that nobody serves.
            # The store does not wait for the others: `meet` does, and can name the missing ranks.
            store = dist.TCPStore(*where, env.world_size, serves, timeout, wait_for_workers=False)
        except RuntimeError as error:
            said = str(error).splitlines()[0][:160]
            raise LaunchError(
                f"nobody answers at MASTER_ADDR={env.master_addr!r}, MASTER_PORT={env.master_port}, where rank "
                f"{env.rank} of {env.world_size} must meet the others (waited up to {timeout.total_seconds():g} s; "
                f"{said}); it cannot train alone. Check that rank 0 started, and that all ranks have its address."
            ) from error
        _stores[address] = _of_this_start(store, env, timeout)
    _stores[address].set_timeout(timeout)
    return _stores[address]


def _of_this_start(store: Any, env: LaunchEnv, timeout: timedelta) -> Any:
    """Return `store` under a prefix that only the ranks of this start know; rank 0 sends it to each (collective).

    torchrun's agent keeps one store over all its restarts, and new ranks would read the addresses of dead ones from
    it. Its count of restarts cannot be the prefix: each node has its own.
    """
    if not env.agent_store:
        return store
    from torch.distributed import PrefixStore

    mine, end = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    if env.rank > 0:
        store.set(f"ddpshim/hello/{env.rank}", mine)
        store.wait([f"ddpshim/answer/{mine}"], timeout)
        prefix = store.get(f"ddpshim/answer/{mine}").decode(errors="replace")
        store.set(f"ddpshim/heard/{prefix}/{mine}", "")
        return PrefixStore(prefix, store)
    for rank in range(1, env.world_size):
        is_heard = False
        while not is_heard:
            store.wait([f"ddpshim/hello/{rank}"], timedelta(seconds=max(0.1, end - time.monotonic())))
            # May come from a rank that has died: then nobody confirms, and the next one is read.
            theirs = store.get(f"ddpshim/hello/{rank}").decode(errors="replace")
            store.set(f"ddpshim/answer/{theirs}", mine)
            patience = 0.5 if time.monotonic() < end else 0.0
            with contextlib.suppress(RuntimeError, ValueError) if patience else contextlib.nullcontext():
                store.wait([f"ddpshim/heard/{mine}/{theirs}"], timedelta(seconds=max(0.01, patience)))
                is_heard = True
        store.delete_key(f"ddpshim/hello/{rank}")  # a rank that starts again says it again
    return PrefixStore(mine, store)
