"""Records a run for its certificate, in each rank: a mark every `every` optimizer steps, written by the main rank.

A step is a call of any optimizer's `step`. Hashes are made in a thread, of copies, while training continues.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Container
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import torch

from ddpshim.checkpoint.resume import ProgressFiles
from ddpshim.errors import CertificateError
from ddpshim.job.group import world
from ddpshim.process.job import current, seed_everything
from ddpshim.process.say import say
from ddpshim.rows.gradients import plain
from ddpshim.tools import certificate
from ddpshim.tools.watching import StepRecorder, is_failure, losses_of

_DEADLINE_S = 120.0
_OLD_PER_NEW = 10  # the whole is written again once a tenth of its marks is new


class Certifier(StepRecorder):
    """Records the steps of a rank of a certified run, or of its repetition."""

    def __init__(self, settings: Path) -> None:
        super().__init__(settings.parent)
        chosen = json.loads(settings.read_text())
        self._path, self._last, self._ends = Path(chosen["file"]), chosen["last"], chosen["ends"]
        self._document: dict[str, Any] = chosen["document"]
        every: int = self._document["every"]
        # The steps of marks; those of a repetition are given.
        self._at: Container[int] = set(chosen["at"]) or range(every, sys.maxsize, every)
        self._num_steps = 0
        self._losses: list[list[Any]] = [[]]  # of each step since the last mark, and of the one that is not made yet
        self._stepped: dict[int, Any] = {}  # optimizers, since the last mark, in the order of their first steps
        self._num_new = 0  # marks that the file does not have
        self._reads = certificate.Reads(settings.stat().st_mtime)
        self._writer, self._written = ThreadPoolExecutor(1), list[Future[None]]()  # the last mark's, or empty

    def __enter__(self) -> None:
        seed_everything(self._document["seed"])  # of a program that sets none, or not all
        if self._last is not None:
            self._leave_no_traces()
        self._observe(backward=self._see_loss, after_step=self._after_step)

    def _see_loss(self, tensors: Any) -> None:
        # Not a pass inside another one of this thread (a checkpoint's).
        if torch._C._current_graph_task_id() < 0:
            self._losses[-1] += [plain(loss).detach().clone() for loss in losses_of(tensors)]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._num_steps:
            self._begin()
        self._stepped.setdefault(id(optimizer), optimizer)
        self._num_steps += 1
        self._losses.append([])
        if self._num_steps in self._at:
            self._mark()
        if self._num_steps == self._last and not self._ends:
            self._end(is_complete=False)  # the program does not continue
            self._end_with_peers(_DEADLINE_S)

    def _begin(self) -> None:
        """Learn the number of the first step; all ranks count alike (collective)."""
        job, here = current(), current().world
        if here is None or here.options.exact is None:
            raise CertificateError(
                "this program is not distributed by ddpshim, or without the option exact, so its bits would depend on "
                "the number of ranks, and nobody could check them on another. Set DDPSHIM_EXACT, and do not set "
                "DDPSHIM_UNEDITED=off."
            )
        saves, is_repeating, first = job.part(ProgressFiles), self._last is not None, self._document["first"]
        saves.also.append(self._keep)
        # A later start begins at a mark; a repetition has its last one there.
        saves.before.append(lambda: self._mark(not is_repeating or self._num_steps == self._last))
        job.before_end.callback(lambda: self._mark(not job.is_failing() and not is_failure(sys.exc_info()[1])))
        if here.is_main:
            self._document.update(exact=here.options.exact, ranks=here.world_size, facts={})
            if saves.restored is not None and not is_repeating:
                first = self._continue(saves.restored)
            elif not is_repeating and (folder := certificate.folder_of(self._path)).exists():
                raise CertificateError(
                    f"{folder} holds checkpoints of another start, and this one resumes from "
                    "none: its certificate would name them as its own. Move the folder and the certificate away."
                )
            # In this thread: threads of torch are counted by thread.
            self._document["facts"]["environment"] = certificate.environment(here.device)
        self._num_steps = here.gather(first)[0]

    def _continue(self, restored: Path) -> int:
        """Continue the certificate of the start that saved the file `restored`; return its step. Local."""
        # By their names: a start that was killed has not listed its last one.
        kept = certificate.folder_of(self._path).glob(f"step_*_{restored.name}") if self._path.exists() else ()
        step = max((int(path.name.split("_")[1]) for path in kept), default=None)
        if step is None:
            raise CertificateError(
                f"this start resumes from {restored}, which {self._path} does not know: the certificate would not say "
                "how the run came there. Certify a run from its beginning, with an empty folder of its own."
            )
        self._document = certificate.read(self._path)
        for name in ("marks", "checkpoints"):
            self._document[name] = [item for item in self._document[name] if item["step"] <= step]
        return step

    def _keep(self, written: Path) -> tuple[Any, ...]:
        """Return what to call once the file `written` of a Resumable is on disk. Local, on the main rank."""
        folder = certificate.folder_of(self._path)
        folder.mkdir(parents=True, exist_ok=True)
        self._wait()
        if self._num_new:  # a later start continues from the file if it is there, and so from its mark
            self._write(is_complete=False)
        return _link, written, folder / f"step_{self._num_steps:09d}_{written.name}"

    # Marks

    def _mark(self, is_due: bool = True) -> None:
        """Record the state after this step, or where a file is saved or the program ends, unless it is there. Local."""
        if not is_due or len(self._losses) == 1:
            return
        here, (*steps, not_made) = world(), self._losses
        self._losses = [not_made]
        if not here.is_main:
            return
        # All ranks have the same. Sorted: then the bits of a sum do not depend on the order.
        losses = [sum(sorted(map(float, step)), 0.0) for step in steps]
        self._reads.look()
        groups = [group for optimizer in self._stepped.values() for group in optimizer.param_groups]
        weights = [parameter.detach().to("cpu", copy=True) for group in groups for parameter in group["params"]]
        self._stepped = {}
        self._wait()
        mark = {"step": self._num_steps, "losses": losses}
        self._written = [self._writer.submit(self._add, mark, weights)]

    def _wait(self) -> None:
        """Wait until the last mark is written. Raises CertificateError if it could not be."""
        for written in self._written:
            if (error := written.exception()) is not None:
                raise CertificateError(f"{self._path} could not be written ({error}): nobody could check this run.")

    def _add(self, mark: dict[str, Any], weights: list[Any]) -> None:
        """Hash a mark's weights, and write the certificate. In a thread of its own."""
        if "code" not in self._document["facts"]:
            self._see_facts()
        made = hashlib.sha256()
        for tensor in weights:
            made.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            made.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
        mark["weights"] = made.hexdigest()
        self._document["marks"].append(mark)
        self._num_new += 1
        if self._num_new * _OLD_PER_NEW > len(self._document["marks"]):
            self._write(is_complete=False)

    def _see_facts(self) -> None:
        facts = self._document["facts"]
        facts.update(code=self._reads.code(), data=self._reads.data(), packages=certificate.packages())

    def _write(self, is_complete: bool) -> None:
        known = {saved["file"] for saved in self._document["checkpoints"]}
        for path in sorted(certificate.folder_of(self._path).glob("step_*.pth")):
            if path.name not in known:
                step = int(path.name.split("_")[1])
                saved = {"step": step, "file": path.name, "sha256": certificate.sha256_of(path)}
                self._document["checkpoints"].append(saved)
        self._document["is_complete"] = is_complete
        certificate.write(self._document, self._path)
        self._num_new = 0

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        if os.getpid() == self._process:
            self._end(is_complete=not is_failure(error))

    def _end(self, is_complete: bool) -> None:
        """Write the end of the certificate; `is_complete`: the program ended by itself without an error. Local."""
        self._undo.close()
        if not self._written:
            if self._rank == 0:
                say(f"no certificate: the program made {self._num_steps or 'no'} steps, and none of them was recorded")
            return
        try:
            self._wait()
        except CertificateError as error:
            say(str(error))
            return
        if self._last is None:
            self._reads.look()
            self._see_facts()
        self._write(is_complete)
        if self._last is None:
            last = self._document["marks"][-1]["step"]
            say(f"{self._path} certifies {last} steps; check it with `check --certificate`")


def _link(written: Path, kept: Path) -> None:
    """Keep a file that is replaced by newer ones. In the thread that writes in the background."""
    kept.unlink(missing_ok=True)
    try:
        os.link(written, kept)
    except OSError:  # another disk
        shutil.copyfile(written, kept)
