"""Resumes a training in the middle of an epoch, on any number of ranks, after a signal or a kill."""

from __future__ import annotations

import functools
import itertools
import math
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional, Protocol

import torch

from ddpshim import variables
from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint import progress_folder
from ddpshim.errors import CheckpointError, DataError, SyncError
from ddpshim.failures import preemption
from ddpshim.job.collectives import pairs
from ddpshim.job.group import cleanup, world
from ddpshim.job.passes import Enterable, order_of, restore_generators
from ddpshim.job.running import Running
from ddpshim.job.world import World
from ddpshim.model import guard, sharding
from ddpshim.options import Options
from ddpshim.process import messages, observed
from ddpshim.process.devices import computes_on
from ddpshim.process.job import current, derive_seed, seed_everything
from ddpshim.process.launch_env import EXIT_REQUEUE
from ddpshim.process.observed import observe
from ddpshim.process.random_streams import rank_states
from ddpshim.process.say import count, say, say_on_main
from ddpshim.shares.streams import draws_alike

_LOOK_EVERY_S = 0.5
_MAX_STEPS_BETWEEN_LOOKS = 64  # a limit, as steps may become slower
_MOST_BATCHES_OF_A_STEP = 64  # a limit, as a program may update weights without an optimizer
FORMAT = "progress of a Resumable, 1"  # of the files; changes with their parts


class Stateful(Protocol):
    """An object whose state is saved and restored: a network, optimizer, scheduler, scaler, ..."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class ProgressFiles:
    """What a certificate needs of this job's files of progress."""

    def __init__(self) -> None:
        self.restored: Optional[Path] = None  # the file that was restored, on the main rank
        # Nothing is saved: a part of a certified run is repeated, beside the user's own files.
        self.is_off = bool(os.environ.get(variables.RESUME_FROM))
        self.before: list[Callable[[], None]] = []  # collective: before a save, or where one could have been made
        self.also: list[Callable[[Path], tuple[Any, ...]]] = []  # for a file: what to call once it is on disk


class Resumable:
    """Saves the progress of a training to files, from which a later start resumes.

    ::

        training = ddpshim.Resumable("out/resume", {"net": net, "optimizer": optimizer})
        training.restore()
        for epoch in range(training.epoch, 10):
            for batch in training.steps(loader, epoch):
                ...
            schedule.step()
        training.finish()

    About twice a second, between two steps, all ranks check together whether to save or stop. They save when the main
    rank's clock says so, and when any of them has received SIGTERM or SIGUSR1: then all exit with code 75, which asks
    the scheduler to restart the job. A resumed run gets exactly the remaining samples, in the same order, also on
    another number of ranks; on the same number, each rank's random streams continue as well, and on another those that
    all ranks have equally. Gradients are saved, too; while a program accumulates them over batches, ranks wait for the
    step of its optimizer.

    A loop without epochs uses `iterations()`.

    A run that is interrupted between the last step of an epoch and the next epoch repeats the code in between: call
    `look` there before schedulers step and `values` change, not after.

    After `setup(batch="global")` ranks check only at the start of an epoch of a stream, or of a subclass of torch's
    DataLoader, which cannot be resumed in the middle. Without a launcher that holds for every loader, and signals are
    not handled.

    Args:
        folder: the folder for the files, on a disk that the main rank can also read next time.
        objects: everything with a state, by name, the same on all ranks; networks after `wrap_parallel`.
        every_s, every_n_steps: the interval between two saves; default: the options `checkpoint_every_s` and
            `checkpoint_every_n_steps`.
        num_kept: how many files to keep; if the newest is damaged, an older one is used. Default: `keep_checkpoints`.
        before_exit: called on every rank before it exits because of a signal, for example to flush a logger.

    Attributes:
        epoch: where to resume; 0 in a new training.
        step: the number of steps done in that epoch.
        values: anything else to save, such as the best loss so far: numbers, text, tensors, arrays, and tuples, lists,
            sets and mappings of them. Other objects need the option `trust_progress`. The main rank's are saved.
    """

    def __init__(
        self,
        folder: checkpoint.PathLike,
        objects: Mapping[str, Stateful],
        *,
        every_s: Optional[float] = None,
        every_n_steps: Optional[int] = None,
        num_kept: Optional[int] = None,
        before_exit: Optional[Callable[[], None]] = None,
    ) -> None:
        self._world = world()
        timeout = current().timeout  # that of `setup`; None in a group of the program's own
        given: dict[str, Any] = {"checkpoint_every_s": every_s, "keep_checkpoints": num_kept}
        given |= {"checkpoint_every_n_steps": every_n_steps, "timeout_s": timeout and timeout.total_seconds()}
        self._options = replace(self._world.options, **{name: n for name, n in given.items() if n is not None})
        self.folder = Path(folder)
        self.epoch = self.step = 0
        self.values: dict[str, Any] = {}
        self._objects = objects
        self._before_exit = before_exit
        self._restored: Optional[dict[str, Any]] = None  # a file's content, until all of it is in place
        self._facts: dict[str, Any] = {}
        self._computes_on = None if self._options.exact is None else computes_on(self._world.device)
        self._loader: Any = None  # of the current epoch
        # This rank's random streams after the steps of an epoch: a resumed run repeats the code between two epochs, and
        # must draw the same numbers in it.
        self._streams: Optional[dict[str, Any]] = None
        self._moments = _Moments(self._world, self._options)

    def restore(self, later_than: tuple[int, int] = (-1, 0)) -> bool:
        """Restore the newest file if it is beyond `later_than` (epoch, step); return whether it was (collective).

        If an earlier start of this job has finished the training, this process ends with exit code 0.
        The main rank reads; it renames truncated or damaged files, says so, and uses the one before.
        """
        progress_folder.leave_if_finished(self.folder)
        found = self._world.run_on_main(self._read, later_than)
        if found is None:
            return False
        for name, stateful in self._objects.items():
            stateful.load_state_dict(found["objects"].pop(name))
        for name, gradients in found.pop("gradients").items():
            for p, gradient in zip(sharding.parameters(self._objects.get(name)), gradients):
                if gradient is not None:
                    p.grad = sharding.part(gradient, p).to(p.device)
                    setattr(p.grad, guard.REDUCED, True)
        self.epoch, self.step, self.values = found["epoch"], found["step"], found["values"]
        self._restored = found
        if self._world.is_main:
            ranks = count(found["world_size"], "rank")
            if found["computes_on"] not in (None, self._computes_on):
                was, now = found["computes_on"], self._computes_on
                say(
                    f"exact={self._options.exact}: the run was on {was} and is now on {now}, so results "
                    "differ in their last bits from now on"
                )
            say(f"resuming at epoch {self.epoch}, step {self.step}, of a run on {ranks} ({self.folder})", directly=True)
        return True

    def steps(self, loader: Any, epoch: int, num_steps: Optional[int] = None) -> Iterator[Any]:
        """Yield the remaining batches of `epoch`: all of them, or those after `step` in the epoch that is resumed.

        Collective, because all ranks check together. `num_steps` is the length of an epoch (default: that of `loader`);
        a shorter loader is iterated again.

        Raises DataError if the epoch was started with another dataset or global batch.
        """
        try:
            length = len(loader)
        except TypeError as error:
            raise DataError(
                f"Resumable.steps: {error}; a place in an epoch of unknown length cannot be resumed. Give the dataset "
                "a __len__, or iterate through Resumable.iterations()."
            ) from None
        total = length if num_steps is None else num_steps
        is_enterable = isinstance(loader, Enterable)
        can_enter = is_enterable and loader.can_enter()
        if self._world.is_launched and not can_enter:
            say_on_main(
                "Resumable saves, and reacts to signals, only between two epochs, because this loader cannot resume "
                "in the middle of one: SIGTERM more than 25 s earlier ends the run without a save"
            )
        start = self.step if epoch == self.epoch else 0
        facts = {
            "steps of an epoch": total,
            "steps of a pass over the data": getattr(loader, "num_steps_of_a_pass", length),
            "global batch": getattr(loader, "global_batch_size", getattr(loader, "batch_size", None)),
            "pieces of a batch (exact)": self._options.exact,
            "order": getattr(loader, "order", None),  # of make_loader
        }
        order = self._enter(start, facts, can_enter) if epoch == self.epoch else None
        self.epoch, self.step, self._streams, self._facts, self._loader = epoch, start, None, facts, loader
        if is_enterable:
            num_passes, first = divmod(start, length)
            if order is not None and num_passes and not first:  # the end of a pass, where torch's sampler may draw
                num_passes, first = num_passes - 1, length
            number = epoch * math.ceil(total / length) + num_passes
            loader.enter(number, first, order, is_inside=start < total and first > 0)
        elif order is not None:
            restore_generators(loader, order["generators"])
        draws_seed = is_enterable or order is None or not order["workers stay"]
        batches = iter(loader) if 0 < start < total else iter(())
        for step in range(start, total):
            self.step = step
            if can_enter or step == 0:
                self._look(self._options.timeout_s if can_enter else self._options.side_timeout_s, may_wait=step > 0)
            if step == 0:  # not before: a run that stops in this look draws the epoch's order after resuming
                batches = iter(loader) if draws_seed else _begun(loader)
            try:
                batch = next(batches)
            except StopIteration:
                if not can_enter and total == len(loader):  # which torch overestimates for a stream read by workers
                    break
                batches = iter(loader)
                batch = next(batches)
            self._moments.num_unsaved += 1
            yield batch
        if total % len(loader) == 0:
            next(batches, None)  # as a `for` loop does: torch's sampler may draw once more at the end
        self.end_epoch(total)

    def iterations(self, num: Optional[int] = None) -> Iterator[int]:
        """Yield the remaining iteration numbers, up to `num` or without end, for a loop without a loader (collective).

        For reinforcement learning: `for iteration in training.iterations(): ...` starts at 0, or at the iteration that
        was interrupted, which is repeated. Each counts as an epoch, and as a step for `every_n_steps`. Before each, all
        ranks check together, and wait for those that still play.
        """
        self._enter(0, {}, can_enter=True)
        numbers = itertools.count(self.epoch) if num is None else range(self.epoch, num)
        for self.epoch in numbers:
            self.step, self._facts, self._loader = 0, {}, None
            self._look(self._options.side_timeout_s)
            self._moments.num_unsaved += 1
            yield self.epoch
        if num is not None:
            self.epoch = max(self.epoch, num)

    def end_epoch(self, num_steps: int) -> None:
        """Mark all steps of the epoch as done; `steps` calls this when it is exhausted. Local."""
        self.step, self._streams = num_steps, rank_states(self._world.device)

    def look(self) -> None:
        """Save or exit here, if ranks agree that it is time. Collective: call it between two steps.

        In some calls ranks tell each other what they want, and agree in which call to do so again.

        Raises SyncError if a rank does not arrive within `timeout_s`.
        """
        self._look(self._options.timeout_s)

    def _look(self, deadline_s: float, may_wait: bool = False) -> None:
        wanted = self._moments.wanted(f"step {self.step} of epoch {self.epoch}", deadline_s, may_wait)
        if wanted is not None:
            self.leave(wanted) if wanted else self.save()

    def save(self) -> None:
        """Save the progress, and remove all but the newest files. Collective; the main rank writes.

        With the option `background_save` it writes while training continues (`checkpoint.save_in_background`).

        While ranks hold gradients of their own (`no_sync`), only a later check saves.

        Raises CheckpointError on the main rank if this file, or that of the last call, cannot be written; earlier files
        are unchanged.
        """
        if _holds_own_gradients():
            self._moments.want_a_save()
            return
        checkpoint.flush()
        guard.check_equal_steps("the step before a save")
        saves = current().part(ProgressFiles)
        for call in saves.before:
            call()
        self._moments.note_save()
        if saves.is_off:
            return
        for stateful in self._objects.values():
            if isinstance(stateful, Running):
                stateful.collect()
        order = order_of(self._loader)
        states = self._world.gather((self._streams or rank_states(self._world.device), order))
        of_objects = self._objects.items()
        objects = {name: stateful.state_dict() for name, stateful in of_objects}  # collective if sharded
        gradients = {name: [sharding.whole(p.grad) for p in sharding.parameters(each)] for name, each in of_objects}
        if not self._world.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT,
            "epoch": self.epoch,
            "step": self.step,
            "world_size": self._world.world_size,
            "computes_on": self._computes_on,
            "objects": objects,
            "gradients": gradients,
            "values": self.values,
            "random": [streams for streams, _ in states],  # by rank
            "order": [of_rank for _, of_rank in states],  # the same: with already_sharded each draws its own
            "facts": self._facts,
        }
        for left in self.folder.glob(".epoch_*.partial"):
            shutil.rmtree(left, ignore_errors=True)  # from a process that was killed while writing
        written = self.folder / f"epoch_{self.epoch:06d}_step_{self.step:09d}.pth"
        in_background = self._world.is_launched and self._options.background_save
        save = checkpoint.save_in_background if in_background else checkpoint.save
        save(progress_folder.plain_content(content, written, self._options.trust_progress), written)
        for also in saves.also:
            checkpoint.afterwards(*also(written))
        checkpoint.afterwards(progress_folder.keep_newest, written, self._options.keep_checkpoints)

    def leave(self, reason: str) -> NoReturn:
        """Save, and exit with code 75, on all ranks (collective)."""
        self.save()
        checkpoint.flush()
        self._world.barrier()  # a launcher that sees one rank end kills those that are still writing
        if self._world.is_main:
            say(
                f"{reason}: epoch {self.epoch}, step {self.step} is saved in {self.folder}; stopping with exit code "
                f"{EXIT_REQUEUE}",
                directly=True,
            )
        observed.note("end", how="left", reason=reason, epoch=self.epoch, step=self.step, exit_code=EXIT_REQUEUE)
        if self._before_exit is not None:
            try:
                self._before_exit()
            except Exception:  # all is saved: a failing logger must not prevent the restart of the job
                traceback.print_exc()
        cleanup()
        raise SystemExit(EXIT_REQUEUE)

    def finish(self) -> None:
        """Remove the progress of a complete training. SIGTERM ends the process again; SIGUSR1 does not. Local.

        With a launcher, a file beside the folder tells later starts that the training is finished.
        """
        preemption.unlisten(is_complete=True)
        if self._world.is_main and not current().part(ProgressFiles).is_off:
            checkpoint.flush()
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._world.is_launched:
                progress_folder.mark_finished(self.folder)

    def _read(self, later_than: tuple[int, int]) -> Optional[dict[str, Any]]:
        path = progress_folder.find_progress(self.folder)
        if path is None:
            return None
        found: Any = progress_folder.read_plain(path, self._options.trust_progress)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is not a progress file of this ddpshim's Resumable, and was not used. Remove it, or use "
                "another folder."
            )
        lacking = [name for name in self._objects if name not in found["objects"]]
        if lacking:
            raise CheckpointError(
                f"{path} has no state of {', '.join(lacking)}, but of {', '.join(map(str, found['objects']))}: "
                "these would start over. Give the same objects as the run that wrote it, or use another folder."
            )
        if (found["epoch"], found["step"]) <= later_than:
            return None
        current().part(ProgressFiles).restored = path
        return found

    def _enter(self, start: int, facts: dict[str, Any], can_enter: bool) -> Optional[dict[str, Any]]:
        """Restore this rank's streams in the epoch that was interrupted, if one was; return the order of its loader."""
        found, self._restored = self._restored, None
        if found is None:
            return None
        odd = [name for name in facts if found["facts"] and found["facts"][name] != facts[name]]
        if (start or self._options.per_rank_batch) and odd:
            was, now = found["facts"][odd[0]], facts[odd[0]]
            raise DataError(
                f"epoch {self.epoch} was left at step {start} with {odd[0]} {was}, and would resume with {now}; "
                "samples would be seen twice or not at all. Resume with the same data and batch, or remove "
                f"{self.folder}."
            )
        if start and not can_enter:
            raise DataError(
                f"epoch {self.epoch} was left at step {start}, but this loader cannot start mid-epoch; samples "
                "would be seen twice. Use ddpshim.make_loader and a launcher (torchrun, even for one process)."
            )
        states, here = found["random"], self._world
        is_same_size = len(states) == here.world_size
        are_equal = len({messages.packed(state) for state in states}) == 1
        if draws_alike() or is_same_size or are_equal:  # equal streams stay so: ranks may slice a permutation
            own = states[here.rank if is_same_size and not draws_alike() else 0]
            progress_folder.restore_streams(own, here.device, self.folder)
        else:
            seed_everything(derive_seed(here.seed or 0, "rank", here.rank, "resumed", self.epoch, start))
        order: Optional[dict[str, Any]] = found["order"][here.rank if is_same_size else 0]
        return order


class _Moments:
    """When to save: ranks learn together what any of them wants, and wait until an optimizer has stepped."""

    def __init__(self, here: World, options: Options) -> None:
        self._world, self._options = here, options
        self._wanted: Optional[str] = None  # the signals for which to save and exit; "": only to save
        self._last_save, self.num_unsaved = time.monotonic(), 0
        # Of the checks of all ranks together: the calls since the last one, and those from it to the next; its time.
        self._num_calls, self._interval, self._last_look = 0, 1, time.monotonic()
        # Whether a backward pass followed the last step of an optimizer; at how many boundaries in a row that was so.
        self._accumulates, self._num_accumulated = False, 0
        if here.is_launched:
            preemption.listen()
            until, note = current().at_end, functools.partial(setattr, self, "_accumulates")
            until.callback(preemption.leave)
            observe(until, backward=lambda _: note(True), after_step=lambda *_: note(False))

    def want_a_save(self) -> None:
        self._wanted = self._wanted or ""

    def note_save(self) -> None:
        self._last_save, self.num_unsaved, self._wanted = time.monotonic(), 0, None

    def wanted(self, place: str, deadline_s: float, may_wait: bool) -> Optional[str]:
        """Return why to save and exit at this boundary between steps, "" to save only, None to go on (collective)."""
        is_off = current().part(ProgressFiles).is_off
        if self.num_unsaved >= (self._options.checkpoint_every_n_steps or math.inf) or is_off:
            self.want_a_save()
        self._num_accumulated = self._num_accumulated + 1 if self._accumulates else 0
        self._num_calls += 1
        if self._num_calls == self._interval:
            self._meet(place, deadline_s)
        if self._wanted is None:
            return None
        # A program that counts the batches of its loop begins to accumulate anew when it is resumed.
        waits = may_wait and 0 < self._num_accumulated <= _MOST_BATCHES_OF_A_STEP and not is_off
        own = waits or _holds_own_gradients()
        if any(self._world.gather_with_deadline("accumulation", own, deadline_s).values()):
            if self._wanted:
                say_on_main(f"{self._wanted}: saving after the optimizer's next step")
            return None
        if may_wait and self._num_accumulated > _MOST_BATCHES_OF_A_STEP:
            say_on_main(
                f"no batch of the last {_MOST_BATCHES_OF_A_STEP} ended with a step of an optimizer: gradients are "
                "saved, too. To accumulate them, count batches by the `step` of Resumable, which is resumed"
            )
        return self._wanted

    def _meet(self, place: str, deadline_s: float) -> None:
        """Learn what any rank wants, and agree when to do so again (collective)."""
        now = time.monotonic()
        wanted = int(_LOOK_EVERY_S * self._num_calls / max(now - self._last_look, 1e-6))
        wanted = max(1, min(wanted, 2 * self._num_calls, _MAX_STEPS_BETWEEN_LOOKS))
        is_due = now - self._last_save > (self._options.checkpoint_every_s or math.inf) and self._wanted is None
        own = int(self._world.is_main and is_due)
        if (asked := preemption.asked()) is not None:
            own = 2 + preemption.SIGNALS.index(asked)
        try:
            reports = pairs((own, wanted), self._world, timedelta(seconds=deadline_s))
        except RuntimeError as error:
            raise SyncError(
                f"another rank did not reach {place} within {deadline_s:g} s of rank {self._world.rank}; that rank "
                "waits for gradients that no rank will send, or for its data. Give every rank the same number of "
                "batches, and skip no step on one rank alone."
            ) from error
        asks, intervals = zip(*reports)
        self._num_calls, self._interval, self._last_look = 0, min(intervals), now
        if any(asks):
            signals = {rank: preemption.SIGNALS[theirs - 2] for rank, theirs in enumerate(asks) if theirs > 1}
            told = ", ".join(f"{signal} on rank {rank}" for rank, signal in signals.items())
            self._wanted = told or self._wanted or ""


def _begun(loader: Any) -> Iterator[Any]:
    """Return `iter(loader)`, without the draw of a seed for workers, which torch made in an earlier pass. Local."""
    own, loader.generator = loader.generator, torch.Generator()
    try:
        return iter(loader)
    finally:
        loader.generator = own


def _holds_own_gradients() -> bool:
    """Whether this rank holds gradients that no pass has reduced yet (no_sync). Local."""
    return any(wrapped.has_unreduced_gradients for wrapped in current().part(guard.GuardState).owners.values())
