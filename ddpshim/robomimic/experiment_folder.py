"""Makes the experiment's directories on the main rank, or finds those of the start that this one resumes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Optional

from ddpshim.checkpoint import last_save
from ddpshim.checkpoint.progress_folder import find_progress, leave_if_finished
from ddpshim.errors import LaunchError
from ddpshim.job.world import world, world_of_shares
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say
from ddpshim.trainers.session import FOLDER, session, wants_to_go_on


def get_exp_dir(config: Any, **options: Any) -> Any:
    """Return the experiment's directories; only the main rank asks about, removes and makes them (collective).

    If a launcher or scheduler has started this job before (or with the option resume=always, or upstream's `--resume`),
    they are those of the last start that saved its progress, and the user is not asked; if that start has finished,
    this one ends with exit code 0. Before upstream asks whether to overwrite, a line says which unfinished progress
    that deletes. The first directory gets links to the ranks' logs, if `ddpshim run` keeps them.

    Raises LaunchError if upstream asks about an existing directory while standard input is closed.
    """
    here = world_of_shares()
    newest = here.run_on_main(_newest_start, config, options.get("resume", False))
    if newest is not None and not options.get("resume"):
        leave_if_finished(newest / FOLDER)
    directories, session().goes_on = here.run_on_main(_get_exp_dir, config, options, newest)
    session().open(Path(directories[0]).parent)  # where config.json will be
    return directories


def _starts(config: Any) -> list[Path]:
    """Return the folders of all starts under this name, the newest last."""
    import robomimic

    output = Path(robomimic.__path__[0], os.path.expanduser(config.train.output_dir), config.experiment.name)
    return sorted(logs.parent for logs in output.glob("*/logs"))


def _newest_start(config: Any, is_asked: bool) -> Optional[Path]:
    """Return the folder of the last start if this one may resume it. Older ones are never resumed."""
    return next(reversed(_starts(config)), None) if wants_to_go_on(is_asked) else None


def _get_exp_dir(config: Any, options: dict[str, Any], newest: Optional[Path]) -> tuple[Any, bool]:
    """Return the directories, and whether they contain progress."""
    import robomimic.utils.train_utils as TrainUtils

    here = world()
    if newest is not None and find_progress(newest / FOLDER) is not None:
        in_some = ["vis"] if (newest / "vis").is_dir() else []  # robocasa and DROID have it
        folders = [str(newest / name) for name in ("logs", "models", "videos", *in_some)]
        if not config.experiment.save.enabled:
            folders[1] = None  # type: ignore[call-overload]
        return (*folders, str(newest)) if "resume" in options else tuple(folders), True
    if not here.is_launched:
        return TrainUtils.get_exp_dir(config, **options), False
    # After a restart an existing directory is this job's own, from a start that saved nothing: keep it without asking.
    is_own = here.is_restarted and wants_to_go_on() and not options.get("resume")
    about = "" if is_own or options.get("resume") else _about(_starts(config))
    if about:
        say(about)

    def ask(prompt: str) -> str:
        try:
            return input(prompt)
        except (EOFError, OSError, RuntimeError) as error:  # RuntimeError: there is no standard input at all
            raise LaunchError(
                f"an experiment of this name exists, and robomimic asks: {' '.join(prompt.split())} Standard input is "
                f"closed ({type(error).__name__}), so nothing was started. {about and about + ' '}To train from the "
                "beginning, use another experiment.name, or remove that directory."
            ) from error

    with replaced(TrainUtils, "input", (lambda prompt: "n") if is_own else ask):
        return TrainUtils.get_exp_dir(config, **options), False


def _about(starts: list[Path]) -> str:
    """Return which progress of earlier `starts` would be lost, or that there is none although it was asked for."""
    chosen = world().options
    unfinished = next((start for start in reversed(starts) if last_save.place(start / FOLDER)), None)
    if unfinished is not None:
        later = " and ".join(str(start) for start in starts if start > unfinished)
        return (
            f"{unfinished} holds unfinished progress ({last_save.place(unfinished / FOLDER)}); overwriting deletes it. "
            f"To resume it, {f'remove the later {later}, and ' if later else ''}start again with DDPSHIM_RESUME=always."
        )
    if starts and chosen.resume == "always":
        names = ("checkpoint_every_s", "checkpoint_every_n_steps")
        every = " and ".join(f"{name}={value:g}" for name in names if (value := getattr(chosen, name)) is not None)
        return f"resume=always, but {starts[-1]} holds no saved step: a run saves at SIGTERM, and by {every}."
    return ""
