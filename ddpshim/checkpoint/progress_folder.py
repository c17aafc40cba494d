"""The folder of a `Resumable`: its files, which are kept, and the mark beside it that the training is finished."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Optional

from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint.latest import link
from ddpshim.job.group import cleanup, world
from ddpshim.job.launch_env import is_start_of, read_job_names
from ddpshim.job.say import say

PATTERN = "epoch_*_step_*.pth"


def keep_newest(written: Path, num_kept: int) -> None:
    """Remove all progress beside `written` but the newest; by name, as the clock of another node may be behind."""
    there = sorted((p for p in written.parent.glob(PATTERN) if p.suffix == ".pth"), reverse=True)
    later = [path for path in there if path > written]  # of a run that was given up: not to be taken for this one's
    for path in later + there[len(later) + num_kept :]:
        path.unlink()
    link(written, "latest.pth")


def _mark(folder: checkpoint.PathLike) -> Path:
    return Path(folder).with_name(f"{Path(folder).name}.finished")


def mark_finished(folder: Path) -> None:
    mark = _mark(folder)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps(read_job_names(os.environ)))
    except OSError as error:
        say(f"{mark} could not be written ({error}): a later start would not know that the training is finished")


def leave_if_finished(folder: checkpoint.PathLike) -> None:
    """End this process with exit code 0 where an earlier start of this job has finished the training (collective).

    A scheduler may start a job again that is done (a requeue, a chain of jobs). Any earlier start counts with the
    option resume=always; else those of this job, where a launcher or scheduler has started it before.
    """
    here = world()
    mark = here.run_on_main(_finished_mark, folder)  # the main rank's: torchrun's agents count restarts each for itself
    if mark is not None:
        if here.is_main:
            say(
                f"the training is already finished (see {mark}); stopping with exit code 0. To train again, remove "
                "that file, or use another name",
                directly=True,
            )
        cleanup()
        raise SystemExit(0)


def _finished_mark(folder: checkpoint.PathLike) -> Optional[Path]:
    mark, here = _mark(folder), world()
    choice = here.options.resume
    if (
        not mark.is_file()
        or not here.is_launched
        or not (choice == "always" or (choice == "auto" and here.is_restarted))
    ):
        return None
    return mark if choice == "always" or is_start_of(json.loads(mark.read_text()), os.environ) else None


def find_progress(folder: checkpoint.PathLike) -> Optional[Path]:
    """The newest whole file of a `Resumable` in `folder`, or None. Damaged ones are renamed, with a warning. Local."""
    checkpoint.flush()
    for path in sorted(Path(folder).glob(PATTERN), reverse=True):
        damage = checkpoint.find_damage(path)
        if damage is None:
            return path
        aside = path.with_name(path.name + ".damaged")
        os.replace(path, aside)
        text = f"{path} is damaged ({damage}) and was renamed to {aside.name}; the previous one is used, if any"
        say(text, directly=True)
    return None
