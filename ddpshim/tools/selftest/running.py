"""Starts the self-test's ranks on this node, joins those of other nodes, and names the rank that fails first.

This process has the role of torchrun's agent. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Optional

from ddpshim.errors import DdpShimError, LaunchError
from ddpshim.failures.failure import claim
from ddpshim.failures.failure_notes import meaning_of
from ddpshim.failures.port import check_port
from ddpshim.process.launch_env import read_launch_env
from ddpshim.version import __version__

if TYPE_CHECKING:
    from ddpshim.tools.selftest.checks import Outcome, Place

# Wait this long for the other ranks' reports after the first failure. It exceeds checks.WATCHDOG_S, so that a rank
# that started the check later can still report.
_GRACE_S = 6.0
_OTHER_NODES_S = 15.0  # node 0 serves the store this long for other nodes that still read it
_DEFAULT_PORT = 29500
_NUM_LAST_LINES = 15
_UNREACHED = "Check the firewall, and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network that the nodes share"


@dataclass(frozen=True)
class Plan:
    """What is tested: `nproc` ranks on each of `nnodes` nodes; this node is number `node_rank`.

    Defaults for None: `nproc` is the number of GPUs, or 2 on the CPU; `device` is cuda if torch sees a GPU; the node
    rank and the master are read from the launcher's variables (srun with one task per node).
    """

    nproc: Optional[int] = None
    device: Optional[str] = None
    nnodes: int = 1
    node_rank: Optional[int] = None
    master_addr: Optional[str] = None
    master_port: Optional[int] = None
    timeout_s: float = 60.0


class SelfTestFailed(DdpShimError):
    """A check failed; the text names it, the rank, and what to do."""

    is_consequence = False  # True if another rank, perhaps on another node, caused it
    rank: Optional[int] = None  # the rank that failed


def run(
    options: Plan,
    environ: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = print,
    run_rank: Optional[Callable[[Place, Any], None]] = None,
) -> str:
    """Run the self-test and return its last line. Prints one line per check, with its time, through `say`.

    Local for one node; else every node calls it. Each rank runs `run_rank`, by default `checks.run_rank`. Raises
    SelfTestFailed if a check fails, and LaunchError if the nodes do not find each other or the options are invalid.
    """
    begun = time.monotonic()
    options = completed(options, environ)
    context = preloading_context()  # its process imports torch while this one does
    import torch

    from ddpshim.tools.selftest import checks

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    nproc = options.nproc or (max(1, torch.cuda.device_count()) if device == "cuda" else 2)
    options = replace(options, device=device, nproc=nproc)
    do_checks = run_rank or checks.run_rank
    with tempfile.TemporaryDirectory() as folder, started(options, context, folder, do_checks) as (nodes, ranks):
        num_nodes = f"{options.nnodes} node{'s' * (options.nnodes > 1)}"
        num_ranks = ranks.places[0].world_size
        say(f"ddpshim selftest: {num_ranks} ranks on {num_nodes}, {device}")
        if options.nnodes > 1:
            found = (f"{facts['host']} ({facts['nproc']} ranks)" for _, facts in sorted(nodes.joined.items()))
            say(_line("nodes", time.monotonic() - begun, f"found: {', '.join(found)}"))
        try:
            for name in checks.names(device):
                reports = ranks.reports_of(name, options.timeout_s)
                detail = next((report.detail for report in reports if report.detail), "")
                say(_line(name, max(report.seconds for report in reports), detail))
            ranks.join(options.timeout_s)
        except SelfTestFailed as failure:
            raise nodes.first_failure(failure) from None
    took = f"{len(checks.names(device))} checks, {time.monotonic() - begun:.1f} s"
    return f"selftest passed: {num_ranks} ranks on {num_nodes}, {device}, {took}"


@contextlib.contextmanager
def started(
    options: Plan, context: Any, folder: str, run_rank: Callable[[Place, Any], None], **place: Any
) -> Iterator[tuple[_Nodes, _Ranks]]:
    """Within this block, run the ranks of a completed plan; `place` has further fields for each rank's Place."""
    nodes = _Nodes(options)
    try:
        nodes.call(options)
        places = [replace(here, **place) for here in nodes.places(str(options.device), folder)]
        ranks = _Ranks(context, places, run_rank)
        try:
            yield nodes, ranks
        finally:
            ranks.end()
    finally:
        nodes.leave()


def completed(options: Plan, environ: Mapping[str, str]) -> Plan:
    """Return `options` with the missing node rank and master taken from the launcher's variables.

    Raises LaunchError if they are missing there too, or a value is invalid.
    """
    if options.nnodes < 1 or (options.nproc is not None and options.nproc < 1) or not 0 < options.timeout_s < 1e7:
        raise LaunchError(
            f"nnodes={options.nnodes}, nproc={options.nproc}, timeout={options.timeout_s:g}: each must be at least "
            "1, and the timeout at most 1e7 seconds; nothing was tested. Correct these values."
        )
    if options.nnodes == 1:
        return replace(options, node_rank=0, master_addr="127.0.0.1")
    if options.node_rank is None or options.master_addr is None:
        env = read_launch_env(environ)
        if not env.is_launched or env.world_size != options.nnodes or env.local_world_size != 1:
            raise LaunchError(
                f"--nnodes {options.nnodes} without --node-rank and --master-addr, and not started by a launcher "
                f"with one process on each node ({env.reason}): the nodes would not find each other. Give both on "
                f"every node, or `srun --nodes={options.nnodes} --ntasks-per-node=1 python -m ddpshim selftest "
                "--nnodes ...`."
            )
        options = replace(
            options,
            node_rank=env.rank if options.node_rank is None else options.node_rank,
            master_addr=options.master_addr or env.master_addr,
            master_port=options.master_port or env.master_port,
        )
    if not 0 <= (options.node_rank or 0) < options.nnodes:
        raise LaunchError(
            f"--node-rank {options.node_rank} is not one of {options.nnodes} nodes: the others would wait for a "
            f"node that does not exist. Number them from 0 to {options.nnodes - 1}."
        )
    return replace(options, master_port=options.master_port or _DEFAULT_PORT)


def preloading_context(*modules: str) -> Any:
    """Return a context whose processes start quickly, forked from one that has imported torch and `modules`."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [*modules, "ddpshim.tools.selftest.checks", "torch._dynamo", "torch.nn.parallel.distributed"]
    )
    forkserver.ensure_running()
    return context


class _Nodes:
    """The store of the job, which node 0 serves, and the nodes that have registered in it."""

    def __init__(self, options: Plan) -> None:
        """Raises LaunchError if this node cannot serve or reach the store within the deadline."""
        self.own, self.timeout_s = options.node_rank or 0, options.timeout_s
        self.master_addr = str(options.master_addr)
        self.store = self._join(options)
        self.joined: dict[int, dict[str, Any]] = {self.own: {"nproc": options.nproc}}
        self._is_twin = False  # True if another node registered this node's number first

    def _join(self, options: Plan) -> Any:
        from ddpshim.failures.listening import stores

        address, port = self.master_addr, options.master_port or 0
        timeout = timedelta(seconds=self.timeout_s)
        if self.own != 0:
            _reach(address, port, self.own, self.timeout_s)
        elif port:
            place = {"rank": 0, "world_size": 2, "local_rank": 0, "local_world_size": 1}
            check_port(read_launch_env({}, **place, master_addr=address, master_port=port))
        try:
            store_class = stores(is_one_node=options.nnodes == 1)
            return store_class(address, port, None, self.own == 0, timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise LaunchError(
                f"node {self.own} cannot {'join' if self.own else 'serve'} the store at {address}:{port} "
                f"({str(error).splitlines()[0]}): no job could start. "
                f"{_UNREACHED if self.own else 'Give an address of node 0 as --master-addr, and a free --master-port'}."
            ) from error

    def places(self, device: str, folder: str) -> list[Place]:
        """Return the Place of each rank of this node."""
        from ddpshim.tools.selftest.checks import Place

        num_ranks = [int(self.joined[node]["nproc"]) for node in sorted(self.joined)]
        first, size, local_size = sum(num_ranks[: self.own]), sum(num_ranks), num_ranks[self.own]
        here = (self.own, self.master_addr, self.store.port, device, self.timeout_s, folder)
        return [Place(first + local, size, local, local_size, *here) for local in range(local_size)]

    def call(self, options: Plan) -> None:
        """Register this node and wait for all others (collective over the nodes).

        Raises LaunchError if one is missing, or has another version of torch or ddpshim, or another device.
        """
        if options.nnodes == 1:
            return
        import torch

        from ddpshim.process.messages import from_store

        versions = {"torch": str(torch.__version__), "ddpshim": __version__}
        own = {"host": socket.gethostname(), "nproc": options.nproc, "device": options.device, **versions}
        if self.store.add(f"selftest/claims/{self.own}", 1) > 1:
            self._is_twin = True
            raise LaunchError(
                f"--node-rank {self.own} is used by another node, so one number is missing and the nodes would "
                f"hang. Give each its own, from 0 to {options.nnodes - 1}."
            )
        self.store.set(f"selftest/node/{self.own}", json.dumps(own))
        end = time.monotonic() + self.timeout_s
        if self.own == 0:
            said = {}
            for node in range(options.nnodes):
                with contextlib.suppress(RuntimeError):  # a timeout: reported below, with all missing nodes
                    self.store.wait([f"selftest/node/{node}"], timedelta(seconds=max(0.1, end - time.monotonic())))
                    key = f"selftest/node/{node}"
                    said[node] = from_store(self.store.get(key), key, _are_facts)
            self.store.set("selftest/roll", json.dumps(said))
        else:
            self.store.set_timeout(timedelta(seconds=self.timeout_s + _GRACE_S))
            try:
                roll = self.store.get("selftest/roll")
            except RuntimeError as error:
                raise LaunchError(
                    f"node {self.own} lost the store of node 0 at {self.master_addr}:{self.store.port}: its "
                    "self-test ended, as a job would. Read its output there."
                ) from error
            nodes = {str(node): node for node in range(options.nnodes)}
            every = from_store(
                roll,
                "selftest/roll",
                lambda v: isinstance(v, dict) and v.keys() <= nodes.keys() and all(map(_are_facts, v.values())),
            )
            said = {nodes[node]: facts for node, facts in every.items()}
        self.joined = said
        missing = [node for node in range(options.nnodes) if node not in said]
        if missing:
            present = ", ".join(f"{node} ({facts['host']})" for node, facts in said.items())
            raise LaunchError(
                f"of {options.nnodes} nodes {', '.join(map(str, missing))} did not reach "
                f"{self.master_addr}:{self.store.port} within {self.timeout_s:g} s; found: {present}. A job would "
                "wait for them. Start the same command there, and read its output."
            )
        for fact in ("torch", "ddpshim", "device"):
            odd = next((node for node in said if said[node][fact] != said[0][fact]), None)
            if odd is not None:
                raise LaunchError(
                    f"node 0 has {fact} {said[0][fact]}, node {odd} ({said[odd]['host']}) {said[odd][fact]}: ranks "
                    "could not communicate, or would compute differently. Use the same on every node."
                )

    def first_failure(self, failure: SelfTestFailed) -> SelfTestFailed:
        """Return the failure of the node that reported first: it caused the others. With one node, return `failure`."""
        if len(self.joined) == 1:
            return failure
        mine = f"node {self.own} ({socket.gethostname()}): {failure}"
        if failure.is_consequence:
            with contextlib.suppress(RuntimeError):  # no node reported a cause
                self.store.wait(["selftest/failure"], timedelta(seconds=2 * _GRACE_S))
        try:
            return SelfTestFailed(claim(self.store, "selftest/failure", mine))
        except RuntimeError:
            return SelfTestFailed(f"{failure} Node 0 has ended, too; read its output there.")

    def leave(self) -> None:
        """Wait until no node needs the store any more, at most `_OTHER_NODES_S`."""
        if self._is_twin:  # the node that really has this number still needs the store
            return
        with contextlib.suppress(RuntimeError):  # the store or the other nodes have already ended
            self.store.set(f"selftest/left/{self.own}", "1")
            if self.own == 0:
                keys = [f"selftest/left/{node}" for node in self.joined]
                self.store.wait(keys, timedelta(seconds=_OTHER_NODES_S))


_FACTS = {"host": str, "nproc": int, "device": str, "torch": str, "ddpshim": str}


def _are_facts(found: Any) -> bool:
    """Whether `found` has the fields that a node registers."""
    return isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in _FACTS.items())


def _reach(address: str, port: int, own: int, timeout_s: float) -> None:
    """Return when a connection to node 0 succeeds. Raises LaunchError with the reason if none does in time."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(0.1, min(5.0, end - time.monotonic()))):
                return
        except (OSError, UnicodeError) as error:  # UnicodeError: `address` is not a valid host name
            if isinstance(error, (socket.gaierror, UnicodeError)):
                why = "this node cannot resolve the name. Use an IP address of node 0 as --master-addr"
            elif isinstance(error, ConnectionRefusedError):
                why = "that machine answers, but not on this port: node 0 has not started, or uses another port"
            else:
                why = f"that address does not answer. {_UNREACHED}"
            if isinstance(error, (socket.gaierror, UnicodeError)) or time.monotonic() >= end:
                raise LaunchError(
                    f"node {own} cannot reach node 0 at {address}:{port} ({error}), tried for {timeout_s:g} s; a job "
                    f"would wait for it until its timeout. {why[0].upper()}{why[1:]}."
                ) from error
            time.sleep(0.2)


class _Ranks:
    """The processes of this node's ranks, and what they report."""

    def __init__(self, context: Any, places: list[Place], run_rank: Callable[[Place, Any], None]) -> None:
        self.places = places
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        for place in places:
            receive, send = context.Pipe(duplex=False)
            self._pipes.append(receive)
            # Not daemons: they could not start the data workers of the sharding check. `end` kills the processes.
            self._processes.append(context.Process(target=run_rank, args=(place, send), daemon=False))
            self._processes[-1].start()
            send.close()

    def reports_of(self, name: str, timeout_s: float) -> list[Outcome]:
        """Return each rank's Outcome of one check; raises SelfTestFailed with the rank that failed first."""
        from ddpshim.tools.selftest.checks import Outcome

        reports: dict[int, Outcome] = {}
        end = time.monotonic() + timeout_s + 2 * _GRACE_S
        while len(reports) < len(self.places) and time.monotonic() < end:
            waiting = {pipe: local for local, pipe in enumerate(self._pipes) if local not in reports}
            for pipe in multiprocessing.connection.wait(list(waiting), max(0.0, end - time.monotonic())):
                local = waiting[pipe]
                try:
                    reports[local] = self._pipes[local].recv()
                except (EOFError, OSError):
                    said = self._last_words(local)
                    reports[local] = Outcome(self.places[local].rank, time.time(), 0.0, error=said)
                if reports[local].error is not None:
                    end = min(end, time.monotonic() + _GRACE_S)
        silent = [place.rank for local, place in enumerate(self.places) if local not in reports]
        # A rank that only lost a peer, or waited for one, is reported only if no other rank failed.
        failures = (report for report in reports.values() if report.error is not None)
        first = min(failures, key=lambda report: (report.is_consequence, report.moment), default=None)
        if first is not None and not (first.is_consequence and silent):
            # ddpshim's own errors, which are no tracebacks, already say what to do.
            foreign = name == "rendezvous" and str(first.error).startswith("Traceback")
            hint = f"\n{_UNREACHED}." if foreign or first.is_consequence else ""
            failed = SelfTestFailed(f"{name}, rank {first.rank}: {first.error}{hint}")
            failed.is_consequence, failed.rank = first.is_consequence, first.rank
            raise failed
        if silent:
            others = f" ({first.error})" if first is not None else ""
            failed = SelfTestFailed(
                f"{name}, rank {silent[0]}: no answer for {timeout_s:g} s{others}; a job would hang here. Run it again "
                "with a longer --timeout, and with NCCL_DEBUG=INFO."
            )
            failed.rank = silent[0]
            raise failed
        return [reports[local] for local in range(len(self.places))]

    def _last_words(self, local: int) -> str:
        """Return how a rank ended that sent no report: its stack if it hung, else its exit code and last output."""
        self._processes[local].join(_GRACE_S)
        code = self._processes[local].exitcode
        with open(self.places[local].log, errors="replace") as file:
            _, hung, stack = file.read().rpartition("Timeout (")
        if hung:
            return f"no answer; a job would hang at this stack:\n{hung}{stack}".strip()
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        said = "\n".join(stack.splitlines()[-_NUM_LAST_LINES:])
        return f"ended without an error message ({how})\n{said}".strip()

    def join(self, timeout_s: float) -> None:
        """Wait for the ranks to leave the group and end; raises SelfTestFailed if an exit code is not 0."""
        end = time.monotonic() + timeout_s
        for local, process in enumerate(self._processes):
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode != 0:
                said = self._last_words(local)
                failed = SelfTestFailed(f"teardown, rank {self.places[local].rank}: {said}")
                failed.is_consequence = meaning_of(said) is not None  # a rank of another node left earlier
                raise failed

    def end(self) -> None:
        """Kill the ranks that are still alive."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _line(name: str, seconds: float, detail: str) -> str:
    return f"  {name:13} ok {seconds:5.1f} s  {detail}"


def coloured(line: str, is_good: bool, stream: Any = None) -> str:
    """Return `line` in green or red if `stream` (default stdout) is a terminal and NO_COLOR is not set."""
    out = stream or sys.stdout
    if not out.isatty() or os.environ.get("NO_COLOR"):
        return line
    return f"\033[{32 if is_good else 31}m{line}\033[0m"
