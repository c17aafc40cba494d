"""Makes the job's store listen only at the address to which ranks connect; torch's own listens on all interfaces."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterator
from typing import Any, Optional

import torch.distributed as dist

from ddpshim.failures.rendezvous import stay_on_this_machine
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say

_LOOPBACK = re.compile(r"localhost(\.localdomain)?", re.IGNORECASE)
_BACKLOG = 4096


def stores(is_one_node: bool) -> type[dist.TCPStore]:
    """Return torch's TCPStore with a server that listens no wider than it must; it warns if that is everywhere. Local.

    Args:
        is_one_node: whether all clients are on this machine. On others a name may have another address.
    """

    class Store(dist.TCPStore):
        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: Optional[int] = None,
            is_master: bool = False,
            *more: Any,
            **named: Any,
        ) -> None:
            listening = _listen(host_name, port, is_one_node) if is_master else None
            if listening is None:
                super().__init__(host_name, port, world_size, is_master, *more, **named)
            else:
                port, spare = listening.getsockname()[1], listening.dup()
                named["master_listen_fd"] = listening.detach()  # the store closes it
                try:
                    super().__init__(host_name, port, world_size, is_master, *more, **named)
                    spare.close()
                except NotImplementedError:  # torch 2.4: its libuv server cannot use an existing socket
                    named.update(master_listen_fd=spare.detach(), use_libuv=False)
                    super().__init__(host_name, port, world_size, is_master, *more, **named)
            if is_master and listening is None:
                say(
                    f"the job's store listens on all interfaces of this machine, at port {self.port}: whoever reaches "
                    "it can disturb the job. Close the port to others, or give node 0's IP address as MASTER_ADDR"
                )

    return Store


@contextlib.contextmanager
def narrowed(is_one_node: bool) -> Iterator[None]:
    """Within the block, torch's agent in this process makes its stores from `stores`. Local.

    On one node it also makes the ranks' gloo groups listen on loopback, unless GLOO_SOCKET_IFNAME is set.
    """
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

    if is_one_node:
        stay_on_this_machine()
    narrow = stores(is_one_node)
    with contextlib.ExitStack() as undo:
        for module in (dist, c10d_rendezvous_backend, static_tcp_rendezvous):
            undo.enter_context(replaced(module, "TCPStore", narrow))
        yield


def addresses(host: str, is_one_node: bool) -> list[tuple[int, str]]:
    """Return (family, address) pairs to which all clients of `host` connect; none if these are unknown. Local."""
    with contextlib.suppress(ValueError):
        number = ipaddress.ip_address(host)
        return [(socket.AF_INET if number.version == 4 else socket.AF_INET6, host)]
    if not is_one_node and not _LOOPBACK.fullmatch(host):
        return []
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # torch's clients try IPv6 first, and warn if nobody answers.
    return sorted(((int(each[0]), str(each[4][0])) for each in found), key=lambda at: at[0] != socket.AF_INET6)


def _listen(host: str, port: int, is_one_node: bool) -> Optional[socket.socket]:
    """Return a socket that listens at such an address; None if it cannot: then torch listens, or reports the error."""
    for family, at in addresses(host, is_one_node):
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
            listening = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
            listening.bind((at, port))
            listening.listen(_BACKLOG)
            undo.pop_all()
            return listening
    return None
