"""Rows of evidence/faults.md that are quick to check and differ in kind; the rest is `python -m evidence.fault_table`.

A killed rank and an existing experiment are in test_robomimic.py; exceptions, also in data workers, and exits are in
tests/promises.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Optional

import pytest
import torch.distributed as dist

from ddpshim.errors import SyncError
from ddpshim.failures import failure, failure_notes
from ddpshim.process.job import current
from ddpshim.process.job_store import ask_store
from evidence import pages
from evidence.fault_table import COLUMNS, FAULTS, PAGE, RELEASE, Fault, complaints, inject, rows_of
from tests.robomimic import require

NAMES = ["sigterm", "disk-full", "other-config", "world-size"]


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(RELEASE)
    return tmp_path_factory.mktemp("faults")


@pytest.mark.launch
@pytest.mark.robomimic
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in NAMES], ids=lambda fault: fault.name)
def test_a_fault_ends_the_job_as_the_table_says(fault: Fault, work: Path) -> None:
    outcome = inject(fault, work / fault.name, work, forked=True)
    assert complaints(fault, outcome) == [], outcome.screen[-5000:]


def test_the_page_has_a_row_for_each_fault() -> None:
    page = PAGE.read_text()
    rows = rows_of(page)
    assert [*rows] == [fault.name for fault in FAULTS]
    assert {len(cells) for cells in rows.values()} == {len(COLUMNS)}
    assert "**but:" not in page
    assert "\n".join(pages.table(COLUMNS, [], prints=False)) in page


def test_a_line_about_another_ranks_failure_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current(), "watched", failure.Watched(dist.HashStore(), None, None))
    failure_notes.claim_first(SyncError("made by a thread, and never raised"))
    assert failure_notes._why(0) == " (SyncError)"
    assert failure_notes._short(ValueError("one\ntwo")) == "ValueError: one"
    assert failure_notes._short(ValueError("a " + 200 * "word ")) == "ValueError: a" + 57 * " word" + " ..."


@pytest.mark.ranks
def test_a_forked_process_leaves_the_connection_of_its_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the rank may have locked it at that moment, for ever in the child."""
    monkeypatch.setattr(current(), "watched", failure.Watched(dist.HashStore(), sys.excepthook, None))
    assert ask_store(lambda store: True)
    if (child := os.fork()) == 0:
        os._exit(3 if ask_store(lambda store: True) is None else 4)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 3


def test_what_comes_on_top_of_a_lost_peer_is_not_the_first_failure() -> None:
    ended = RuntimeError("DataLoader worker is killed by signal: Terminated")
    assert not failure_notes.lost_a_peer(ended)
    ended.__context__ = RuntimeError("Read error: Connection reset by peer")
    assert failure_notes.lost_a_peer(ended)
    assert failure_notes.lost_a_peer(RuntimeError("writev [127.0.0.1]:4: Broken pipe"))
    assert not failure_notes.lost_a_peer(BrokenPipeError(32, "Broken pipe"))


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895", "lost"),
        ("[..gloo/transport/tcp/pair.cc:589] Read error [192.168.70.92]:25266: Connection reset by peer", "lost"),
        ("NCCL error in: ../NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL", "lost"),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            "lost",
        ),
        ("[../unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", "late"),
        ("Application timeout caused pair closure", "late"),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=56693, OpType=BROADCAST)", "late"),
        ("wait timeout after 20000ms, keys: //ddpshim/1/group//worker_rank/1", "late"),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", None),
        ("division by zero", None),
    ],
)
def test_what_gloo_and_nccl_say_of_other_ranks(text: str, meaning: Optional[str]) -> None:
    assert failure_notes.meaning_of(text) == meaning
    assert failure_notes.lost_a_peer(RuntimeError(text)) == (meaning == "lost")
