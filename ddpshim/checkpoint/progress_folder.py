"""Manages the folder of a `Resumable`: keeps its newest files, and marks the training as finished."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from ddpshim import variables
from ddpshim.checkpoint import files
from ddpshim.checkpoint.last_save import PATTERN
from ddpshim.job.group import cleanup, world
from ddpshim.process.launch_env import JOB_NAMES, read_counts
from ddpshim.process.say import say


def keep_newest(written: Path, num_kept: int) -> None:
    """Remove all progress beside `written` except the newest; by name, as another node's clock may be behind."""
    there = sorted((p for p in written.parent.glob(PATTERN) if p.suffix == ".pth"), reverse=True)
    later = [path for path in there if path > written]  # of an abandoned run: not to be resumed
    for path in later + there[len(later) + num_kept :]:
        path.unlink()


THE_BEGINNING = "the beginning"  # for variables.RESUME_FROM


def _mark(folder: files.PathLike) -> Path:
    return Path(folder).with_name(f"{Path(folder).name}.finished")


def mark_finished(folder: Path) -> None:
    mark = _mark(folder)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps(_job_names(os.environ)))
    except OSError as error:
        say(f"{mark} could not be written ({error}): a later start would not know that the training is finished")


def _job_names(environ: Mapping[str, str]) -> dict[str, str]:
    """Return SLURM's and torchrun's names of this job, by variable; a restart keeps them."""
    return {name: environ.get(name, "") for name in JOB_NAMES}


def _is_start_of(names: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Return False if this is a restart of a job with another name, else True, also if that is unknown."""
    counts = read_counts(environ)
    name = next((name for name in JOB_NAMES if counts[name]), "")
    return names.get(name, "") in ("", environ.get(name, "")) or not environ.get(name)


def leave_if_finished(folder: files.PathLike) -> None:
    """End this process with exit code 0 if an earlier start of this job has finished the training (collective).

    A scheduler may restart a finished job (a requeue, a chain of jobs). With resume=always any earlier start counts;
    with resume=auto only one of this job, and only if a launcher or scheduler has restarted it.
    """
    here = world()
    mark = here.run_on_main(_finished_mark, folder)  # one decision: each of torchrun's agents counts its own restarts
    if mark is not None:
        if here.is_main:
            say(
                f"the training is already finished (see {mark}); stopping with exit code 0. To train again, remove "
                "that file, or use another name",
                directly=True,
            )
        cleanup()
        raise SystemExit(0)


def _finished_mark(folder: files.PathLike) -> Optional[Path]:
    mark, here = _mark(folder), world()
    choice = here.options.resume
    if (
        not mark.is_file()
        or not here.is_launched
        or not (choice == "always" or (choice == "auto" and here.is_restarted))
    ):
        return None
    return mark if choice == "always" or _is_start_of(json.loads(mark.read_text()), os.environ) else None


def find_progress(folder: files.PathLike) -> Optional[Path]:
    """Return the newest intact file of a `Resumable` in `folder`, or None; rename damaged ones, and say so. Local."""
    files.flush()
    chosen = os.environ.get(variables.RESUME_FROM)
    if chosen:
        return None if chosen == THE_BEGINNING else Path(chosen)
    for path in sorted(Path(folder).glob(PATTERN), reverse=True):
        damage = files.find_damage(path)
        if damage is None:
            return path
        aside = path.with_name(path.name + ".damaged")
        os.replace(path, aside)
        text = f"{path} is damaged ({damage}) and was renamed to {aside.name}; the previous one is used, if any"
        say(text, directly=True)
    return None
