"""Records a run for its certificate, in each rank: a mark every `every` optimizer steps, written by the main rank.

A step is a call of any optimizer's `step`. Hashes are made in a thread, of copies, while training continues.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from ddpshim.errors import CertificateError
from ddpshim.process.job import current
from ddpshim.process.observed import observe
from ddpshim.process.say import say
from ddpshim.process.seeds import seed_everything
from ddpshim.tools.certificate import document, facts
from ddpshim.tools.check.program import Parameters, end_with_peers, samples_of
from ddpshim.trainers.unedited.reads import Numbers

_ALL = 1 << 32
_DEADLINE_S = 120.0


@contextlib.contextmanager
def recorded(settings: str, argv: Any) -> Iterator[None]:
    """Within this block, record the program `argv` by the JSON file `settings` (`commands.set_up`). Local."""
    recorder = Recorder(Path(settings), list(argv))
    seed_everything(recorder.seed)  # of a program that sets none, or not all
    if recorder.is_repeating:
        from ddpshim.tools.check.new_files import Recorder as NewFiles
        from ddpshim.trainers.unedited.private_files import switch_loggers_off

        switch_loggers_off()
        NewFiles(Path(settings).parent).install()
        builtins.input = lambda prompt="": "n"  # no user can answer
    recorder.install()
    try:
        yield
    finally:
        recorder.end(is_complete=not _is_failing())


def _is_failing() -> bool:
    """Whether an error is ending the program."""
    error = sys.exc_info()[1]
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


class _Step:
    """What is recorded from one step to the next.

    Attributes:
        losses: those of its backward passes.
        samples: the sum of the hashes of its samples.
        numbers: a hash of the numbers that the program read from tensors, in their order.
    """

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.samples = self.numbers = 0


class Recorder:
    """Records this process, not its forked children."""

    def __init__(self, settings: Path, program: list[str]) -> None:
        chosen = json.loads(settings.read_text())
        self._path, self._every, self._folder = Path(chosen["file"]), int(chosen["every"]), settings.parent
        self._last = chosen["last"]
        self.is_repeating = self._last is not None
        self._at, self._between = set(chosen["marks"]), set(chosen["between"])  # steps of a repetition's marks
        self._marked = 0  # the step of the last mark
        self._program, self.seed = program, int(chosen["seed"])
        self._process = os.getpid()
        self._num_steps: Optional[int] = None  # None: no step was made yet
        self._first: int = chosen["first"]
        self._rank = 0
        self._latest = 0  # a hash of this rank's rows of the last batch, unless a backward pass followed
        self._steps = [_Step()]  # since the last mark, and the next
        self._stepped: list[Any] = []  # optimizers, since the last mark, in the order of their first steps
        self._names = weakref.WeakKeyDictionary[Any, list[str]]()  # optimizer -> of its parameters
        self._document: dict[str, Any] = {}
        self._environment: dict[str, Any] = {}
        self._is_on_disk = False  # whether the file has all but newest marks
        self._reads = facts.Reads(settings.stat().st_mtime)
        self._undo = contextlib.ExitStack()
        self._writer: Optional[threading.Thread] = None  # of the last mark
        self._failed: Optional[BaseException] = None

    def install(self) -> None:
        """Start recording."""
        self._reads.install()
        observe(self._undo, batch=self._see_batch, backward=self._see_loss, after_step=self._after_step)
        current().part(Numbers).listener = self._see_number

    def _see_number(self, bits: int) -> None:
        step = self._steps[-1]
        step.numbers = zlib.crc32(b"%d," % bits, step.numbers)

    def _see_batch(self, batches: Any, batch: Any) -> None:
        if os.getpid() != self._process:
            return
        from ddpshim.job.group import world
        from ddpshim.tools.check.watching import is_of_all_ranks

        size, samples = samples_of(batch)
        self._latest = sum(int(name, 16) for name in samples or ())  # in any order: ranks deal rows
        if is_of_all_ranks(batch, size) and world().rank:
            self._latest = 0  # the main rank's is enough

    def _see_loss(self, tensors: Any) -> None:
        import torch

        from ddpshim.rows.gradients import plain

        # Not a pass inside another one of this thread (a checkpoint's).
        if os.getpid() == self._process and torch._C._current_graph_task_id() < 0:
            roots = [tensors] if hasattr(tensors, "numel") else list(tensors)
            step = self._steps[-1]
            step.samples += self._latest
            self._latest = 0
            step.losses += [plain(root).detach().clone() for root in roots if root.numel() == 1]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._process:
            return
        if self._num_steps is None:
            self._begin()
        if not any(known is optimizer for known in self._stepped):
            self._stepped.append(optimizer)
        self._num_steps = (self._num_steps or 0) + 1
        if self._num_steps in self._at if self._at else self._num_steps % self._every == 0:
            self._mark()
        if self._num_steps == self._last and self._last not in self._between:
            self._stop()
        self._steps.append(_Step())

    def _begin(self) -> None:
        """Learn the number of the first step; all ranks count alike (collective)."""
        from ddpshim.checkpoint.resume import Saves
        from ddpshim.process.job import current

        here = current().world
        if here is None or here.options.exact is None:
            raise CertificateError(
                "this program is not distributed by ddpshim, or without the option exact, so its bits would depend on "
                "the number of ranks, and nobody could check them on another. Set DDPSHIM_EXACT, and do not set "
                "DDPSHIM_UNEDITED=off."
            )
        saves = current().part(Saves)
        saves.also.append(self._keep)
        saves.before.append(self._mark_save)  # a later start begins at a mark
        self._rank = here.rank
        if not self.is_repeating and self._rank == 0:
            if saves.restored is not None:
                self._continue(saves.restored)
            elif document.folder_of(self._path).exists():
                raise CertificateError(
                    f"{document.folder_of(self._path)} holds checkpoints of another start, and this one resumes from "
                    "none: its certificate would name them as its own. Move the folder and the certificate away."
                )
        self._num_steps = self._marked = here.gather(self._first)[0]
        current().before_end.callback(self._mark_end)

    def _continue(self, restored: Path) -> None:
        """Continue the certificate of the start that saved the file `restored`. Local."""
        found = document.read(self._path) if self._path.exists() else {"checkpoints": []}
        # By their names: a start that was killed has not listed its last one.
        kept = document.folder_of(self._path).glob(f"step_*_{restored.name}") if self._path.exists() else ()
        step = max((int(path.name.split("_")[1]) for path in kept), default=None)
        if step is None:
            raise CertificateError(
                f"this start resumes from {restored}, which {self._path} does not know: the certificate would not say "
                "how the run came there. Certify a run from its beginning, with an empty folder of its own."
            )
        for name in ("marks", "checkpoints"):
            found[name] = [item for item in found[name] if item["step"] <= step]
        found["starts"] = [*(at for at in found["starts"] if at < step), step]
        self._document, self._first, self._marked = found, step, step

    def _keep(self, written: Path) -> tuple[Any, ...]:
        """Return what to call once the file `written` of a Resumable is on disk. Local, on the main rank."""
        folder = document.folder_of(self._path)
        folder.mkdir(parents=True, exist_ok=True)
        self._wait()  # a later start continues from the file if it is there, and so from its mark
        return _link, written, folder / f"step_{self._num_steps:09d}_{written.name}"

    # Marks

    def _mark(self, is_between: bool = False) -> None:
        """Record the state after this step (collective). `is_between`: draws may have followed it."""
        from ddpshim.job.group import world
        from ddpshim.process.random_streams import digest, rank_states

        here, steps, self._steps = world(), self._steps, []
        self._marked = self._num_steps or 0
        of_ranks = here.gather([step.samples for step in steps])
        if not here.is_main:
            return
        losses = [_sum([float(loss) for loss in step.losses]) for step in steps]  # all ranks have the same
        numbers = [f"{step.numbers:08x}" for step in steps]
        if not self._environment:
            self._environment = facts.environment(here.device)  # in this thread: threads of torch are counted by thread
            self._reads.look()
        cuda = rank_states(here.device)["cuda"]
        generators = digest() + ("" if cuda is None else hashlib.sha256(bytes(cuda.tolist())).hexdigest()[:32])
        samples = [f"{sum(step) % _ALL:08x}" for step in zip(*of_ranks)]
        mark: dict[str, Any] = {"step": self._num_steps, "samples": samples, "losses": losses, "numbers": numbers}
        mark["generators"] = "" if is_between else generators
        moments = [_state_of(optimizer) for optimizer in self._stepped]
        added = (mark, self._weights(), moments)
        self._stepped = []
        self._wait()
        self._writer = threading.Thread(target=self._add, args=added, daemon=True)
        self._writer.start()

    def _weights(self) -> dict[str, list[Any]]:
        """Return copies of the tensors that may have changed since the last mark, by name."""
        found: dict[str, list[Any]] = {}
        called = Counter[str]()
        for optimizer in self._stepped:
            parameters, names = [*_parameters(optimizer)], self._names.get(optimizer, [])
            if len(names) != len(parameters):
                self._names[optimizer] = names = Parameters(parameters).names
            for name, parameter in zip(names, parameters):
                key = f"{name} ({called[name]})" if name and called[name] else name or "tensors of no network"
                found.setdefault(key, []).append(_copied(parameter))
                called[name] += 1
        return found

    def _mark_end(self) -> None:
        """Record the state at the end of the program too (collective)."""
        if not current().is_failing() and not _is_failing():
            self._mark_between()

    def _mark_save(self) -> None:
        """Record the state where a file is saved, or in a repetition where it was (collective)."""
        if not self.is_repeating or self._num_steps in self._between:
            self._mark_between()
            if self._num_steps == self._last:
                self._stop()

    def _mark_between(self) -> None:
        """Record the state between two steps, unless it is recorded (collective)."""
        if self._num_steps and self._num_steps != self._marked:
            following = self._steps.pop()
            self._mark(is_between=True)
            self._steps.append(following)

    def _wait(self) -> None:
        """Wait until the last mark is written. Raises CertificateError if it could not be."""
        if self._writer is not None:
            self._writer.join()
        if self._failed is not None:
            raise CertificateError(f"{self._path} could not be written ({self._failed}): nobody could check this run.")

    def _add(self, mark: dict[str, Any], weights: dict[str, list[Any]], moments: list[Any]) -> None:
        """Hash a mark's tensors, and write the certificate. In a thread of its own."""
        try:
            self._document = self._document or self._head()
            made = hashlib.sha256()
            for numbers, tensors in moments:
                made.update(json.dumps(numbers).encode())
                for tensor in tensors:
                    made.update(_hash(tensor).encode())
            names = self._document["tensors"]
            new = weights.keys() - set(names)  # an optimizer may start later
            names += [name for name in weights if name in new]
            found = (_hash(*weights[name]) if name in weights else document.UNCHANGED for name in names)
            mark.update(weights="".join(found), optimizer=made.hexdigest())
            mark["chain"] = document.chained(document.last_hash(self._document), mark)
            self._document["marks"].append(mark)
            if new or not self._is_on_disk or not document.add(mark, self._path):  # else a line is enough
                self._write(is_complete=False)
        except BaseException as error:  # raised at the next mark
            self._failed = error

    def _head(self) -> dict[str, Any]:
        from ddpshim.job.group import world

        return {
            "certificate": document.SCHEMA,
            "program": self._program,
            "exact": world().options.exact,
            "ranks": world().world_size,
            "every": self._every,
            "first": self._first,
            "seed": self.seed,
            "facts": self._facts(),
            "tensors": [],
            "marks": [],
            "checkpoints": [],
            "starts": [],
            "numbers_at_end": "",
        }

    def _facts(self) -> dict[str, Any]:
        code, packages = facts.code_and_packages(self._reads.here)
        return {"code": code, "packages": packages, "data": self._reads.hashes(), "environment": self._environment}

    def _write(self, is_complete: bool) -> None:
        known = {saved["file"] for saved in self._document["checkpoints"]}
        for path in sorted(document.folder_of(self._path).glob("step_*.pth")):
            if path.name not in known:
                step = int(path.name.split("_")[1])
                saved = {"step": step, "file": path.name, "sha256": facts.sha256_of(path)}
                self._document["checkpoints"].append(saved)
        self._document["is_complete"] = is_complete
        document.write(self._document, self._path)
        self._is_on_disk = True

    def end(self, is_complete: bool) -> None:
        """Write the end of the certificate; `is_complete`: the program ended by itself without an error. Local."""
        if os.getpid() != self._process:
            return
        self._undo.close()
        if self._writer is None:
            if self._rank == 0 and int(os.environ.get("RANK", 0)) == 0:
                say(f"no certificate: the program made {self._num_steps or 'no'} steps, and none of them was recorded")
            return
        try:
            self._wait()
        except CertificateError as error:
            say(str(error))
            return
        if is_complete:
            self._document["numbers_at_end"] = f"{self._steps[-1].numbers:08x}"
        if not self.is_repeating:
            self._reads.look()
            self._document["facts"].update(self._facts())
        self._write(is_complete)
        if not self.is_repeating:
            say(f"{self._path} certifies {self._marked} steps; check it with `check --certificate`")

    def _stop(self) -> None:
        """End this process once its peers have made their last step, so that the program does not continue."""
        from ddpshim.job.group import world

        self.end(is_complete=False)
        (self._folder / f"over_{self._rank}").touch()
        end_with_peers(self._folder, world().world_size, _DEADLINE_S)


def _sum(losses: list[float]) -> float:
    """Return a sum whose bits do not depend on the order."""
    return math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _copied(tensor: Any) -> Any:
    return tensor.detach().to("cpu", copy=True)


def _state_of(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Return an optimizer's numbers (settings of its groups), and copies of the tensors of its state."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    numbers = [sorted((k, float(v)) for k, v in group.items() if isinstance(v, (int, float))) for group in groups]
    states = [optimizer.state.get(p, {}) for p in _parameters(optimizer)]
    found = [value for state in states for _, value in sorted(state.items()) if hasattr(value, "detach")]
    return numbers, [_copied(value) for value in found]


def _hash(*tensors: Any) -> str:
    import torch

    made = hashlib.sha256()
    for tensor in tensors:
        made.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        made.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return made.hexdigest()[: document.WIDTH]


def _link(written: Path, kept: Path) -> None:
    """Keep a file that is replaced by newer ones. In the process that writes in the background."""
    kept.unlink(missing_ok=True)
    try:
        os.link(written, kept)
    except OSError:  # another disk
        shutil.copyfile(written, kept)
