"""Tells from the text of an error whether it says something of another rank; loaded when a rank fails."""

from __future__ import annotations

from typing import Optional

LOST, LATE = "lost", "late"
# What a text in an error means of another rank, and where the text comes from.
SIGNS = {
    "Connection closed by peer": LOST,  # gloo/transport/tcp/pair.cc
    "onnection reset by peer": LOST,  # the same: the system's text for ECONNRESET
    "Broken pipe": LOST,  # the same: the system's text for EPIPE
    "remote process exited or there was a network error": LOST,  # nccl src/init.cc: ncclGetErrorString
    "a remote process exiting prematurely": LOST,  # torch/csrc/distributed/c10d/NCCLUtils.cpp
    "Timed out waiting": LATE,  # gloo/transport/tcp/unbound_buffer.cc
    "Application timeout caused pair closure": LATE,  # the same
    "Watchdog caught collective operation timeout": LATE,  # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
    "wait timeout after ": LATE,  # torch/csrc/distributed/c10d/TCPStore.cpp: a wait in the store, as new_group's
    "Socket Timeout": LATE,  # the same, before torch 2.4
}


def meaning_of(text: str) -> Optional[str]:
    """Return the meaning, LOST or LATE, of the first of `SIGNS` that `text` contains; else None. Local."""
    return next((meaning for sign, meaning in SIGNS.items() if sign in text), None)


def lost_a_peer(error: Optional[BaseException]) -> bool:
    """Return whether `error`, its cause or its context only says that another process is gone. Local."""
    while error is not None:
        is_of_its_own = isinstance(error, BrokenPipeError)  # the program's own pipe
        if meaning_of(str(error)) == LOST and not is_of_its_own:
            return True
        error = error.__cause__ or error.__context__
    return False
