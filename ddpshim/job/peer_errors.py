"""Lists the texts with which gloo and nccl report that another rank is gone, or timed out."""

from __future__ import annotations

from typing import NamedTuple, Optional

LOST, LATE = "lost", "late"


class Sign(NamedTuple):
    """A text in an error, whether it means that a rank is gone or late, and where the text comes from."""

    text: str
    meaning: str
    library: str
    source: str


SIGNS = (
    Sign("Connection closed by peer", LOST, "gloo", "gloo/transport/tcp/pair.cc"),
    Sign("onnection reset by peer", LOST, "gloo", "gloo/transport/tcp/pair.cc: the system's text for ECONNRESET"),
    Sign("Broken pipe", LOST, "gloo", "gloo/transport/tcp/pair.cc: the system's text for EPIPE"),
    Sign("remote process exited or there was a network error", LOST, "nccl", "nccl src/init.cc: ncclGetErrorString"),
    Sign("a remote process exiting prematurely", LOST, "nccl", "torch/csrc/distributed/c10d/NCCLUtils.cpp"),
    Sign("Timed out waiting", LATE, "gloo", "gloo/transport/tcp/unbound_buffer.cc"),
    Sign("Application timeout caused pair closure", LATE, "gloo", "gloo/transport/tcp/unbound_buffer.cc"),
    Sign(
        "Watchdog caught collective operation timeout", LATE, "nccl", "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
    ),
)


def meaning_of(text: str) -> Optional[str]:
    """Return the meaning, LOST or LATE, of the first of `SIGNS` that `text` contains; else None. Local."""
    return next((sign.meaning for sign in SIGNS if sign.text in text), None)


def lost_a_peer(error: Optional[BaseException]) -> bool:
    """Return whether `error`, its cause or its context only says that another process is gone. Local."""
    while error is not None:
        is_of_its_own = isinstance(error, BrokenPipeError)  # the program's own pipe
        if meaning_of(str(error)) == LOST and not is_of_its_own:
            return True
        error = error.__cause__ or error.__context__
    return False


def is_late(error: BaseException) -> bool:
    """Return whether `error` says that another rank timed out. Local."""
    return meaning_of(str(error)) == LATE
