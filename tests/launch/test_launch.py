"""The launch environment: pure functions over dicts, and one really bound port."""

from __future__ import annotations

import dataclasses
import socket
import time
import zlib

import pytest

from ddpshim.errors import LaunchError
from ddpshim.job.world import _OF_LAUNCHERS
from ddpshim.process import job_store
from ddpshim.process.job_store import check_address
from ddpshim.process.launch_env import LaunchEnv, first_host, read_launch_env
from tests.ranks import free_port

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
HAND_SPAWNED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-gpu1-77@1",
    "MASTER_ADDR": "gpu1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_JOBID": "9"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "4000",
}
SUBMITIT = {
    "SUBMITIT_LOCAL_JOB_ID": "77",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
}
# mpirun and srun may be started from this: 7 tasks on 4 nodes, the last node has one.
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[008-011]",
    "SLURM_JOB_NODELIST": "gpu[001-011]",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def read(environ: dict[str, str]) -> LaunchEnv:
    before = dict(environ)
    launch_env = read_launch_env(environ)
    assert environ == before
    assert "\n" not in launch_env.reason
    return launch_env


def place(env: LaunchEnv) -> str:
    """Such as "pmi: rank 3, 1 here, of 4, 2 here, on node 1; at gpu1:29500"."""
    of = f"of {env.world_size}, {env.local_world_size} here, on node {env.node_rank}"
    return f"{env.launcher}: rank {env.rank}, {env.local_rank} here, {of}; at {env.master_addr}:{env.master_port}"


SINGLE = "rank 0, 0 here, of 1, 1 here, on node 0; at None:None"


OF_TORCHRUN = "rank 3, 1 here, of 4, 2 here, on node 1; at gpu1:29500"
OF_SLURM = "rank 6, 0 here, of 7, 1 here, on node 3; at "
SECOND = "rank 1, 1 here, of 2, 2 here, on node 0; at "
PORT_OF_SUBMITIT = 15000 + zlib.crc32(b"SUBMITIT_LOCAL_JOB_ID='77'") % 15000
AT_4000 = {"MASTER_PORT": "4000"}
BY_HAND = {**without(TORCHRUN, "GROUP_RANK", "LOCAL_WORLD_SIZE"), "NODE_RANK": "1", "NNODES": "2"}
READ = {
    "nothing": ({}, f"none: {SINGLE}"),
    "master only": ({"MASTER_ADDR": "gpu1", "MASTER_PORT": "1"}, f"none: {SINGLE}"),
    "torchrun": (TORCHRUN, f"torchrun: {OF_TORCHRUN}"),
    "torchrun without group": (without(TORCHRUN, "GROUP_RANK"), f"torchrun: {OF_TORCHRUN}"),
    "torchrun in mpirun": ({**OPENMPI, **TORCHRUN}, f"torchrun: {OF_TORCHRUN}"),
    "hand-spawned": (HAND_SPAWNED, f"torchrun: {SECOND}localhost:29500"),
    "hand-spawned one node": (
        {**HAND_SPAWNED, "MASTER_ADDR": "gpu1", "LOCAL_WORLD_SIZE": "2"},
        f"torchrun: {SECOND}gpu1:29500",
    ),
    "by hand on two nodes": (BY_HAND, f"torchrun: {OF_TORCHRUN}"),
    "torchrun of one": ({"RANK": "0", "WORLD_SIZE": "1"}, f"torchrun: {SINGLE}"),
    "openmpi": ({**OPENMPI, **AT_4000}, "openmpi: rank 5, 1 here, of 8, 4 here, on node 1; at gpu1:4000"),
    "openmpi round robin": (
        {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2", **AT_4000},
        "openmpi: rank 5, 2 here, of 8, 4 here, on node -1; at gpu1:4000",
    ),
    "submitit": ({**SUBMITIT, **AT_4000}, f"submitit: {SECOND}127.0.0.1:4000"),
    "submitit in an allocation": (
        {**SUBMITIT, "SLURM_JOB_ID": "42", "SLURM_NTASKS": "1"},
        f"submitit: {SECOND}127.0.0.1:{PORT_OF_SUBMITIT}",
    ),
    "submitit of one": ({**SUBMITIT, "SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_NTASKS": "1"}, f"none: {SINGLE}"),
    "mpich": ({**MPICH, **AT_4000}, f"pmi: {SECOND}127.0.0.1:4000"),
    "mvapich sets PMI too": (
        {**MVAPICH, "PMI_RANK": "2", "PMI_SIZE": "4"},
        "pmi: rank 2, 0 here, of 4, 2 here, on node 1; at gpu1:4000",
    ),
    # mpiexec's daemons are one srun task for each node, so SLURM_LOCALID is 0 for all ranks of a node.
    "mpich in a SLURM job": (
        {**SLURM, **MPICH, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", **AT_4000},
        f"pmi: {SECOND}127.0.0.1:4000",
    ),
    "srun --mpi=pmi2": ({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "7", **AT_4000}, f"pmi: {OF_SLURM}gpu008:4000"),
    "srun": ({**SLURM, **AT_4000}, f"slurm: {OF_SLURM}gpu008:4000"),
    "srun, job's nodes": ({**without(SLURM, "SLURM_STEP_NODELIST"), **AT_4000}, f"slurm: {OF_SLURM}gpu001:4000"),
    "srun, address given": ({**SLURM, "MASTER_ADDR": "h", "MASTER_PORT": "4"}, f"slurm: {OF_SLURM}h:4"),
    "forced none": ({**TORCHRUN, "DDPSHIM_LAUNCHER": "none"}, f"none: {SINGLE}"),
    "forced mpi": ({**TORCHRUN, **MPICH, "DDPSHIM_LAUNCHER": "mpi"}, f"pmi: {SECOND}gpu1:29500"),
    "forced slurm": ({**SLURM, **TORCHRUN, "DDPSHIM_LAUNCHER": "slurm"}, f"slurm: {OF_SLURM}gpu1:29500"),
    "forced slurm in a pty": (
        {**SLURM, "SLURM_PTY_PORT": "1", **AT_4000, "DDPSHIM_LAUNCHER": "slurm"},
        f"slurm: {OF_SLURM}gpu008:4000",
    ),
}


@pytest.mark.parametrize(("environ", "expected"), READ.values(), ids=READ)
def test_reads(environ, expected):
    env = read(environ)
    assert place(env) == expected
    assert env.is_launched == (env.launcher != "none")
    assert not env.is_launched or any(name.startswith(_OF_LAUNCHERS) for name in environ)  # or nobody reads them


def test_agent_store_and_the_reason():
    for flag, expected in (("True", True), ("False", False)):
        assert read({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": flag}).agent_store == expected
    assert not read(without(TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE")).agent_store
    assert not read({**SLURM, **TORCHRUN, "DDPSHIM_LAUNCHER": "slurm"}).agent_store
    assert "RANK='3', WORLD_SIZE='4'" in read(TORCHRUN).reason
    assert "SLURM_PROCID='6'" in read(SLURM).reason
    assert "DDPSHIM_LAUNCHER='none'" in read({**TORCHRUN, "DDPSHIM_LAUNCHER": "none"}).reason


ALONE = {
    "allocation only": {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "4"},
    "batch script": {**SLURM, "SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"},
    "first reserved id": {**SLURM, "SLURM_STEP_ID": str(0xFFFFFFF0)},
    "one task": {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "rank of another step": {**SLURM, "SLURM_PROCID": "7"},
    "shell of srun --pty": {**SLURM, "SLURM_PTY_PORT": "40000"},
    "shell of srun --pty --mpi=pmi2": {**SLURM, "SLURM_PTY_PORT": "4", "PMI_RANK": "6", "PMI_SIZE": "7"},
    "no step": without(SLURM, "SLURM_STEP_ID"),
}


@pytest.mark.parametrize("environ", ALONE.values(), ids=ALONE)
def test_alone_in_an_allocation(environ):
    env = read(environ)
    assert place(env) == f"none: {SINGLE}"
    assert "SLURM" in env.reason
    assert "single process" in env.reason
    assert read({**SLURM, "SLURM_STEP_ID": str(0xFFFFFFEF)}).launcher == "slurm", "the last id that is not reserved"


# What each message has to hold: the variable, its value, and the cure.
ERRORS = {
    "lone LOCAL_RANK": ({"LOCAL_RANK": "0"}, ["LOCAL_RANK='0'", "RANK and WORLD_SIZE not set", "torchrun"]),
    "lone RANK": ({"RANK": "0"}, ["RANK='0'", "WORLD_SIZE not set", "export WORLD_SIZE"]),
    "WORLD_SIZE in srun": ({**SLURM, "WORLD_SIZE": "7"}, ["WORLD_SIZE='7'", "RANK not set", "DDPSHIM_LAUNCHER"]),
    "rank = size": ({**TORCHRUN, "RANK": "4"}, ["RANK=4", "WORLD_SIZE=4", "Correct"]),
    "rank -1": ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'", "Correct RANK"]),
    "size 0": ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "Correct"]),
    "local rank": ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2", "Correct"]),
    "local size": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE='5'", "WORLD_SIZE='4'", "Correct"]),
    "no address": (without(TORCHRUN, "MASTER_ADDR"), ["WORLD_SIZE='4'", "MASTER_ADDR not set", "export MASTER_ADDR"]),
    "no port": (without(TORCHRUN, "MASTER_PORT"), ["WORLD_SIZE='4'", "MASTER_PORT not set", "export MASTER_PORT"]),
    "port 0": ({**TORCHRUN, "MASTER_PORT": "0"}, ["MASTER_PORT='0'", "Set MASTER_PORT"]),
    "no local rank": ({**HAND_SPAWNED, "MASTER_ADDR": "gpu1"}, ["RANK='1'", "LOCAL_RANK and LOCAL_WORLD_SIZE not set"]),
    "no local size": (without(TORCHRUN, "LOCAL_WORLD_SIZE"), ["LOCAL_RANK='1'", "LOCAL_WORLD_SIZE not set"]),
    "unknown force": ({"DDPSHIM_LAUNCHER": "pbs"}, ["LAUNCHER='pbs'", "torchrun, slurm, mpi, submitit or none"]),
    "force torchrun": ({"DDPSHIM_LAUNCHER": "torchrun"}, ["DDPSHIM_LAUNCHER='torchrun'", "RANK and WORLD_SIZE"]),
    "force mpi": ({"DDPSHIM_LAUNCHER": "mpi"}, ["DDPSHIM_LAUNCHER='mpi'", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]),
    "force slurm": (
        {"DDPSHIM_LAUNCHER": "slurm", "SLURM_JOB_ID": "1"},
        ["DDPSHIM_LAUNCHER='slurm'", "SLURM_PROCID", "export"],
    ),
    "lone OMPI rank": ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_RANK='0'", "OMPI_COMM_WORLD_SIZE not set"]),
    "OMPI address": (without(OPENMPI, "MASTER_ADDR"), ["OMPI_COMM_WORLD_SIZE='8'", "export MASTER_ADDR"]),
    "OMPI port": (without(OPENMPI, "PMIX_NAMESPACE"), ["OMPI_COMM_WORLD_SIZE='8'", "export MASTER_PORT"]),
    "PMI local": (without(MPICH, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ["PMI_RANK='1'", "MPI_LOCALRANKID", "export"]),
    "SLURM local": ({**SLURM, "SLURM_LOCALID": "1"}, ["SLURM_LOCALID=1", "SLURM_STEP_TASKS_PER_NODE=1"]),
    "SLURM no local": (without(SLURM, "SLURM_LOCALID"), ["SLURM_PROCID='6'", "SLURM_LOCALID not set"]),
    "SLURM tasks": ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, ["SLURM_STEP_TASKS_PER_NODE='2(x'", "srun"]),
    "SLURM sum": ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),2"}, ["='2(x3),2'", "STEP_NUM_TASKS='7'", "srun"]),
    "SLURM node": ({**SLURM, "SLURM_NODEID": "4"}, ["SLURM_NODEID='4'", "srun"]),
    "SLURM nodes": ({**SLURM, "SLURM_STEP_NODELIST": "gpu["}, ["SLURM_STEP_NODELIST", "'gpu['", "export MASTER_ADDR"]),
}


def assert_three_parts(message: str, parts: list[str]) -> None:
    for part in parts:
        assert part in message
    # found: consequence. Cure.
    found, _, rest = message.partition(": ")
    consequence, _, cure = rest.partition(". ")
    assert found
    assert consequence
    assert cure.endswith(".")


@pytest.mark.parametrize(("environ", "parts"), ERRORS.values(), ids=ERRORS)
def test_errors(environ, parts):
    with pytest.raises(LaunchError) as caught:
        read(environ)
    assert_three_parts(str(caught.value), parts)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a.c.d,b", "a.c.d"),
        ("gpu[001-003,07]-ib,login1", "gpu001-ib"),
        ("r[0-1]n[8-11],x[3]", "r0n8"),
        ("gpu-a[1,3]", "gpu-a1"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "a,", ",a", "a,,b", "a[", "a]", "a[]", "a[1", "a[[1]]", "a[x]", "a b"])
def test_bad_nodelist(nodelist):
    with pytest.raises(LaunchError) as caught:
        first_host(nodelist)
    assert_three_parts(str(caught.value), [repr(nodelist), "export MASTER_ADDR"])


def test_derived_port_is_the_same_on_all_ranks_and_differs_between_jobs():
    first, last = {**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, SLURM
    port = read(first).master_port
    assert port == read(last).master_port
    assert port is not None
    others = {read({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "1"}).master_port for job in range(42, 62)}
    assert port not in others
    assert len(others) == 20
    assert all(15000 <= other < 30000 for other in others if other is not None)


def test_mpirun_in_a_slurm_job_ignores_its_daemons_step():
    # Rank 0 runs in the batch step; rank 5's node was reached by a step that lacks the first node.
    environ = without({**OPENMPI, **SLURM}, "MASTER_ADDR", "PMIX_NAMESPACE")
    of_head = {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NODELIST": "gpu001"}
    zero = dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0")
    envs = [read(environ), read({**environ, **zero, **of_head})]
    assert [env.launcher for env in envs] == ["openmpi", "openmpi"]
    assert [env.master_addr for env in envs] == ["gpu001", "gpu001"]
    assert envs[0].master_port == envs[1].master_port


@pytest.fixture
def taken():
    """Rank 0 of 2 whose port another socket of this machine listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield read({**HAND_SPAWNED, "RANK": "0", "MASTER_PORT": str(server.getsockname()[1])})


@pytest.mark.parametrize("addr", ["localhost", "127.0.0.1", socket.gethostname()])
def test_check_port_taken(taken, addr):
    with pytest.raises(LaunchError) as caught:
        job_store.meet(dataclasses.replace(taken, master_addr=addr), "job", 1800)  # before it waits for peers
    assert_three_parts(str(caught.value), [f"MASTER_PORT={taken.master_port}", addr, "free port"])


def test_a_port_that_is_free_or_not_ours(taken):
    for change in (
        {"rank": 1, "local_rank": 1},
        {"agent_store": True},
        {"world_size": 1},
        {"master_addr": None, "master_port": None},
        {"master_port": free_port()},
    ):
        for _ in range(2):  # the first leaves nothing behind
            check_address(dataclasses.replace(taken, **change))


@pytest.mark.parametrize(
    ("errors", "num_asked", "said"),
    [
        ([], 1, None),
        ([socket.gaierror(socket.EAI_NONAME, "not known")], 1, "not known"),
        ([socket.gaierror(socket.EAI_AGAIN, "later")], 2, None),  # a name server that was busy
        ([socket.gaierror(socket.EAI_AGAIN, "later")] * 9, 2, "later"),
        ([UnicodeError("label too long")], 1, "label too long"),
    ],
)
def test_a_name_that_does_not_resolve_is_said_at_once(errors, num_asked, said, monkeypatch):
    asked, left = [], list(errors)

    def resolve(host, *args, **options):
        asked.append(host)
        if left:
            raise left.pop(0)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "monotonic", lambda: 2.6 * len(asked))
    env = read({**HAND_SPAWNED, "MASTER_ADDR": "gpu1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    if said is None:
        check_address(env)
    else:
        with pytest.raises(
            LaunchError, match=rf"MASTER_ADDR='gpu1' does not resolve .*{said}\): rank 1 could not reach"
        ):
            job_store.meet(env, "job", 1800)
    assert asked == ["gpu1"] * num_asked
