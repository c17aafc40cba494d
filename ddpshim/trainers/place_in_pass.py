"""Saves the position in the data beside a trainer's own checkpoint, so that it resumes with the next sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint import plain_files
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.job.group import draws_alike, world
from ddpshim.job.random_streams import rank_states
from ddpshim.job.say import say


def keep(loader: ShardedLoader, path: Path, *, with_streams: bool = False) -> None:
    """Write the position to `path` for `enter`; `with_streams`: and the random streams, if the trainer saves none.

    Call on the main rank.
    """
    streams = rank_states(world().device) if with_streams else None
    place = {"facts": _facts(loader), "order": loader.order_state(), "streams": streams}
    checkpoint.save(plain_files.content(place, path, is_trusted=False), path)


def enter(loader: ShardedLoader, path: Path, step: int) -> None:
    """Make `loader` continue after `step` steps of the whole training, with the streams saved at `path` (collective).

    If the file does not exist, or belongs to other data or another batch size, a new pass begins; reported.
    """
    here = world()
    found: Any = here.run_on_main(lambda: plain_files.read(path, is_trusted=False) if path.is_file() else None)
    facts = _facts(loader)
    if not isinstance(found, dict) or found.get("facts") != facts:
        was = "does not exist" if not isinstance(found, dict) else f"is of {found.get('facts')}, not of {facts}"
        if here.is_main:
            say(f"{path} {was}: a new pass over the data begins, as when the trainer resumes without ddpshim")
        return
    number, first = divmod(step, len(loader))
    if number and not first:  # torch's sampler may draw once more at the end of a pass
        number, first = number - 1, len(loader)
    loader.set_epoch(number, first)
    loader.restore_order(found["order"], is_inside=first > 0)
    if found["streams"] is not None and draws_alike():
        plain_files.restore_streams(found["streams"], here.device, path)


def _facts(loader: ShardedLoader) -> dict[str, Any]:
    return {"steps of a pass": len(loader), "global batch": loader.global_batch_size}
