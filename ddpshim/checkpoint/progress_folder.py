"""Manages the folder of a `Resumable`: its files, of which it keeps the newest, and the mark of a finished training.

The files hold plain values and tensors only, so that reading them cannot run code. Objects that need pickle are
refused, unless the option `trust_progress` allows them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Optional

import torch

from ddpshim import variables
from ddpshim.checkpoint import files
from ddpshim.errors import CheckpointError
from ddpshim.job.group import cleanup, world
from ddpshim.process import messages
from ddpshim.process.launch_env import JOB_NAMES, read_counts
from ddpshim.process.random_streams import restore_rank_states
from ddpshim.process.say import say

PATTERN = "epoch_*_step_*.pth"
_NAME = re.compile(r"epoch_(\d+)_step_(\d+)\.pth")
THE_BEGINNING = "the beginning"  # for variables.RESUME_FROM
_OUTLINE, _TENSORS = "outline", "tensors"
_ALLOW = "DDPSHIM_TRUST_PROGRESS=yes allows it, and whoever can write to that folder then runs code in the job"


def last_save(folder: files.PathLike) -> str:
    """Return "epoch 3, step 15", the newest saved step in `folder`; "" without one. Local; reads names only."""
    found = [match for path in Path(folder).glob(PATTERN) if (match := _NAME.fullmatch(path.name))]
    newest = max(((int(match[1]), int(match[2])) for match in found), default=None)
    return "" if newest is None else f"epoch {newest[0]}, step {newest[1]}"


def keep_newest(written: Path, num_kept: int) -> None:
    """Remove all progress beside `written` except the newest; by name, as another node's clock may be behind."""
    there = sorted(written.parent.glob(PATTERN), reverse=True)
    later = [path for path in there if path > written]  # of an abandoned run: not to be resumed
    for path in later + there[len(later) + num_kept :]:
        path.unlink()


def _mark(folder: files.PathLike) -> Path:
    return Path(folder).with_name(f"{Path(folder).name}.finished")


def mark_finished(folder: Path) -> None:
    mark = _mark(folder)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        # SLURM's and torchrun's names of this job, which a restart keeps
        mark.write_text(json.dumps({name: os.environ.get(name, "") for name in JOB_NAMES}))
    except OSError as error:
        say(f"{mark} could not be written ({error}): a later start would not know that the training is finished")


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
    if not mark.is_file() or not here.is_launched:
        return None
    if here.options.resume == "auto" and here.is_restarted:
        counts = read_counts(os.environ)
        name = next((name for name in JOB_NAMES if counts[name]), "")
        names = os.environ.get(name, ""), json.loads(mark.read_text()).get(name, "")
        return mark if "" in names or len({*names}) == 1 else None  # a job without a name may be the same one
    return mark if here.options.resume == "always" else None


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


def plain_content(value: Any, path: files.PathLike, is_trusted: bool) -> dict[str, Any]:
    """Return `value` in the form for `torch.save` to `path`. Local; tensors are not copied.

    Raises CheckpointError if a part of it needs pickle and `is_trusted` is False.
    """
    try:
        outline, tensors = messages.take_apart(value, is_trusted)
    except messages.NotPlain as error:
        raise CheckpointError(
            f"{path} would hold an object: {error}; reading it could run code that someone put into the file. Keep "
            f"numbers, text, tensors and arrays. {_ALLOW}."
        ) from None
    return {_OUTLINE: messages.tensor_of(outline), _TENSORS: tensors}


def read_plain(path: files.PathLike, is_trusted: bool) -> Any:
    """Return the value whose `plain_content` was written to `path`, with tensors on the CPU. Local.

    Raises CheckpointError if the file cannot be read or has another format, or needs pickle and is not trusted.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        return messages.put_together(messages.bytes_of(found[_OUTLINE]), found[_TENSORS], is_trusted)
    except messages.NotPlain as error:
        raise CheckpointError(f"{path} was not read: {error}, and it is not trusted. {_ALLOW}.") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); the training would start over. Make it readable."
        ) from error
    except Exception as error:  # files of other origin make torch raise errors of any type
        said = (str(error).splitlines() or [""])[0][:160]
        raise CheckpointError(
            f"{path} was not written by this ddpshim ({type(error).__name__}: {said}), and was not used. Remove it, "
            "or use another folder."
        ) from error


def restore_streams(states: Any, device: torch.device, path: files.PathLike) -> None:
    """Restore random states that were read from `path`. Local. Raises CheckpointError if they are invalid."""
    try:
        restore_rank_states(states, device)
    except Exception as error:  # generators raise different types for an invalid state
        raise CheckpointError(
            f"{path} holds no RNG states ({type(error).__name__}: {str(error)[:160]}); random numbers "
            "would differ. Remove it."
        ) from error
