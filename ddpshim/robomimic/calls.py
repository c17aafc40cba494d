"""Implements the functions that robomimic's patch sets call: resuming, and rollouts on all ranks.

The numbers need none of them: `ddpshim.setup(batch="global")`, a set's first patch, makes every rank run the whole
program with whole batches. Without a launcher each function does exactly what the line did that it replaces. robomimic
is imported inside the functions only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import torch

from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint.progress_folder import find_progress, last_save, leave_if_finished
from ddpshim.errors import LaunchError
from ddpshim.evaluation.dealing import render_on_own_gpu
from ddpshim.evaluation.evaluating import exact_interval
from ddpshim.failures.failure import abort
from ddpshim.job.world import world
from ddpshim.model import guard
from ddpshim.observe.recording import numbers
from ddpshim.process import observed
from ddpshim.process.job import current
from ddpshim.process.observed import outside_steps
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say
from ddpshim.robomimic import batches, node_memory, rollout
from ddpshim.robomimic.session import FOLDER, algos, session
from ddpshim.variables import RANK_LOGS

_BACKPROP_DIGEST = "33cd2d929a81b581"  # of TorchUtils.backprop_for_loss in 0.3.0, 0.4.0, 0.5.0, and master at d309eae


def get_exp_dir(config: Any, **options: Any) -> Any:
    """Return the experiment's directories (collective; before other calls, and before environments are made).

    If a launcher or scheduler has started this job before (or with the option resume=always, or upstream's `--resume`),
    they are those of the last start that saved its progress, and the user is not asked; if that start has finished,
    this one ends with exit code 0. Before upstream asks whether to overwrite, a line says which unfinished progress
    that deletes.

    Raises LaunchError if upstream asks about an existing directory while standard input is closed.
    """
    here, training = world(), session()
    if not here.is_main and RANK_LOGS not in os.environ:  # torchrun shows what each rank prints, which is the same
        discarded = contextlib.redirect_stdout(open(os.devnull, "w"))  # noqa: SIM115 - until the job ends
        current().at_end.enter_context(discarded)
    render_on_own_gpu(here)
    training.seed = config.train.seed
    is_asked = options.get("resume", False)  # an older start than the last is never resumed
    newest = here.run_on_main(lambda: next(reversed(_starts(config)), None) if _wants_to_go_on(is_asked) else None)
    if newest is not None and not is_asked:
        leave_if_finished(newest / FOLDER)
    if newest is not None and here.run_on_main(find_progress, newest / FOLDER) is not None:
        training.goes_on, directories = True, _existing(config, options, newest)
    else:
        directories = _made(config, options)
    training.open(Path(directories[0]).parent)  # where config.json will be
    return directories


def load_data_for_training(config: Any, obs_keys: Any, **options: Any) -> tuple[Any, Any]:
    """Return upstream's datasets for training and validation; launched, with one cache per node (then collective).

    Raises DataError if the node has no room for the cache.
    """
    import robomimic.utils.dataset as Datasets
    import robomimic.utils.train_utils as TrainUtils

    here, is_cached = world(), config.train.hdf5_cache_mode is not None
    is_shared = is_cached and here.options.node_memory and here.world_size > 1 and node_memory.is_supported()
    sharing = node_memory.shared_cache(Datasets.SequenceDataset, here) if is_shared else contextlib.nullcontext()
    with sharing:
        datasets: tuple[Any, Any] = TrainUtils.load_data_for_training(config, obs_keys=obs_keys, **options)
    for dataset in filter(None, datasets) if is_shared else ():  # else the loader would allocate its own arrays
        batches.WindowFetcher(dataset).attach()
    return datasets


def finish() -> None:
    """Wait until the main rank has saved its files, and record that training has finished (collective)."""
    checkpoint.flush()
    world().barrier()
    observed.note("end", how="finished")
    if (progress := session().progress) is not None:
        progress.finish()


def failed(error: BaseException) -> None:
    """End the job with `error`, which upstream would swallow. Without a launcher return, as upstream does."""
    if world().is_launched:
        abort(error)


def has_checkpoint(resume: bool, *paths: str) -> bool:
    """Return upstream's `resume`, but False for a run that stopped before its first checkpoint."""
    return any(os.path.exists(path) for path in paths) if resume and session().goes_on else resume


def resume(model: Any, data_logger: Any, start_epoch: int, *best_so_far: Any) -> tuple[Any, ...]:
    """Return `start_epoch` and the best numbers so far, from an earlier start if there was one: `Session.resume`.

    From here on ranks also compare target networks and the EMA, which no optimizer steps.
    """
    for algo in algos(model):
        averaged = getattr(getattr(algo, "ema", None), "averaged_model", None)
        for module in (algo.nets, averaged):
            if module is not None:
                guard.watch(module)
    return session().resume(model, data_logger, start_epoch, *best_so_far)


def run_epoch(
    *,
    model: Any,
    data_loader: Any,
    epoch: int,
    num_steps: Optional[int] = None,
    best_so_far: tuple[Any, ...] = (),
    **options: Any,
) -> dict[str, float]:
    """Run upstream's run_epoch between `Session.begin_epoch` and `Session.end_epoch` (collective)."""
    import robomimic.utils.train_utils as TrainUtils

    here, training, log_info = world(), session(), model.log_info
    validates = options.get("validate", False)
    data, left = training.begin_epoch(data_loader, epoch, num_steps, validates, best_so_far)
    if here.is_launched:
        _restore_counters(model, epoch, len(data_loader) if num_steps is None else num_steps)
    with contextlib.ExitStack() as meanwhile:
        meanwhile.enter_context(here.autocast())  # also of the loss
        if here.is_launched:
            meanwhile.enter_context(norms_read_at_once())
            meanwhile.enter_context(replaced(model, "log_info", lambda info: training.note_step(log_info(info))))
        ran = TrainUtils.run_epoch(model=model, data_loader=data, epoch=epoch, num_steps=left, **options)
    return training.end_epoch(ran[0] if isinstance(ran, tuple) else ran)  # DROID's returns its iterator as well


def rollout_with_stats(**options: Any) -> tuple[Mapping[str, Any], Optional[Mapping[str, str]]]:
    """Run upstream's rollout_with_stats on all ranks (`ddpshim.robomimic.rollout`), and record them (collective)."""
    start = time.perf_counter()
    with outside_steps():
        logs, videos, returns = rollout.rollout_with_stats(**options)
    for name, log in logs.items():
        metrics, episodes = numbers(log), options.get("num_episodes")
        if metrics.get("Success_Rate") == -1:  # robocasa's: no episode was played
            del metrics["Success_Rate"]
        played = {"epoch": options.get("epoch"), "episodes": episodes, "metrics": metrics}
        played |= {"returns": returns.get(name), "seconds": time.perf_counter() - start}
        ends = _interval(metrics.get("Success_Rate"), episodes)
        observed.note("rollout", environment=name, interval=ends, **played)
    return logs, videos


def norms_read_at_once() -> contextlib.AbstractContextManager[Any]:
    """In this block, robomimic's `backprop_for_loss` reads all norms at once, if its code is known. Local.

    Upstream reads the norm of every gradient separately, 94 in a step of a transformer: a GPU waits for each.
    """
    import robomimic.utils.torch_utils as TorchUtils

    upstreams = vars(TorchUtils).get("backprop_for_loss")
    if not hasattr(upstreams, "__code__") or batches.digest(upstreams) != _BACKPROP_DIGEST:
        return contextlib.nullcontext()  # unknown code may do something else
    return replaced(TorchUtils, "backprop_for_loss", backprop_for_loss)


def backprop_for_loss(
    net: torch.nn.Module,
    optim: torch.optim.Optimizer,
    loss: torch.Tensor,
    max_grad_norm: Optional[float] = None,
    retain_graph: bool = False,
) -> Any:
    """Do the same as upstream's, but read all norms at once. Local."""
    optim.zero_grad()
    loss.backward(retain_graph=retain_graph)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm)
    gradients = [p.grad.detach() for p in net.parameters() if p.grad is not None]
    kinds = {(g.device, g.dtype, g.layout) for g in gradients}
    if len(kinds) != 1 or gradients[0].is_sparse:
        squares = [g.norm(2).pow(2).item() for g in gradients]
    else:
        squares = torch.stack(torch._foreach_norm(gradients, 2)).pow(2).tolist()
    optim.step()  # after the norms: an optimizer may write to gradients
    return float(sum(squares))


def _interval(rate: Optional[float], episodes: Optional[int]) -> Optional[tuple[float, float]]:
    """Return the interval of a success rate, with 95% confidence; None if that is no number of whole episodes."""
    if not episodes or rate is None or not 0 <= rate <= 1:
        return None
    number = round(rate * episodes)
    return exact_interval(number, episodes) if abs(number - rate * episodes) < 1e-6 * episodes else None


def _restore_counters(model: Any, epoch: int, num_steps: int) -> None:
    """After `--resume`, restore the counters that upstream's checkpoints lack. Local."""
    # An EMA that counts from 0 again loses its average in the next step; td3_bc would update its actor in other steps.
    for algo in algos(model) if epoch > 1 else ():
        ema = getattr(algo, "ema", None)
        if ema is not None and ema.optimization_step == 0:
            ema.optimization_step = (epoch - 1) * num_steps
        if getattr(algo, "actor_update_counter", None) == 0:
            num_epochs = sum(bool(algo._check_epoch(net_name="critic", epoch=past)) for past in range(1, epoch))
            algo.actor_update_counter = num_epochs * num_steps
        if getattr(algo, "_num_batch_steps", None) == 0:  # cql's; it begins with behavioural cloning
            algo._num_batch_steps = (epoch - 1) * num_steps


def _wants_to_go_on(is_asked: bool = False) -> bool:
    """Whether the option `resume` makes this start resume; auto: if the job was restarted, or `is_asked` by a user."""
    here = world()
    choice = here.options.resume
    return here.is_launched and (choice == "always" or (choice == "auto" and (here.is_restarted or is_asked)))


def _starts(config: Any) -> list[Path]:
    """Return the folders of all starts under this name, the newest last."""
    import robomimic

    output = Path(robomimic.__path__[0], os.path.expanduser(config.train.output_dir), config.experiment.name)
    return sorted(logs.parent for logs in output.glob("*/logs"))


def _existing(config: Any, options: dict[str, Any], start: Path) -> tuple[Any, ...]:
    """Return the directories of an earlier start, as upstream's function returns those that it makes. Local."""
    in_some = ["vis"] if (start / "vis").is_dir() else []  # robocasa and DROID have it
    folders: list[Any] = [str(start / name) for name in ("logs", "models", "videos", *in_some)]
    if not config.experiment.save.enabled:
        folders[1] = None
    return (*folders, str(start)) if "resume" in options else tuple(folders)


def _made(config: Any, options: dict[str, Any]) -> Any:
    """Return the directories that upstream's function makes. The main rank asks whether to overwrite (collective)."""
    import robomimic.utils.train_utils as TrainUtils

    here = world()
    if not here.is_launched:
        return TrainUtils.get_exp_dir(config, **options)
    # After a restart an existing directory is this job's own, from a start that saved nothing: keep it without asking.
    is_own = here.is_restarted and _wants_to_go_on() and not options.get("resume")
    about = "" if is_own or options.get("resume") or not here.is_main else _about(_starts(config))
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

    with replaced(TrainUtils, "input", lambda prompt: "n" if is_own else here.run_on_main(ask, prompt)):
        return TrainUtils.get_exp_dir(config, **options)


def _about(starts: list[Path]) -> str:
    """Return which progress of earlier `starts` would be lost, or that there is none although it was asked for."""
    chosen = world().options
    unfinished = next((start for start in reversed(starts) if last_save(start / FOLDER)), None)
    if unfinished is not None:
        later = " and ".join(str(start) for start in starts if start > unfinished)
        return (
            f"{unfinished} holds unfinished progress ({last_save(unfinished / FOLDER)}); overwriting deletes it. "
            f"To resume it, {f'remove the later {later}, and ' if later else ''}start again with DDPSHIM_RESUME=always."
        )
    if starts and chosen.resume == "always":
        names = ("checkpoint_every_s", "checkpoint_every_n_steps")
        every = " and ".join(f"{name}={value:g}" for name in names if (value := getattr(chosen, name)) is not None)
        return f"resume=always, but {starts[-1]} holds no saved step: a run saves at SIGTERM, and by {every}."
    return ""
