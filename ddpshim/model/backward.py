"""Tracks the program's backward passes, and refuses those that cannot be reduced over the ranks."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import SyncError
from ddpshim.failures.failure import abort
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced
from ddpshim.process.say import described


class Passes:
    """The backward passes (calls of torch.autograd.backward) of a job, from the first `watch` on."""

    def __init__(self) -> None:
        self.depth = 0  # more than 1 with reentrant checkpoints, whose passes are nested
        self.losses: Any = None  # of the outermost pass that is under way
        self.at_outer_end: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []  # called after each outermost pass
        self.once_after: list[Callable[[], None]] = []  # called after the outermost pass that is under way
        self.has_outer_end = False  # whether the engine will call `end` when the outermost pass ends
        self.unfinished: Callable[[], Optional[str]] = lambda: None
        self.left: Optional[str] = None  # the pass that an exception aborted
        self.has_refused = False

    def queue_end(self) -> None:
        """Make the engine call `end` when the current pass of this thread ends, if it will not already."""
        if not self.has_outer_end:
            at_end_of_pass(self.end)
            self.has_outer_end = True

    def end(self) -> None:
        calls, self.at_outer_end, self.has_outer_end = self.at_outer_end, [], False
        for call in calls:
            call()

    def drop(self) -> None:
        """Drop all pending calls, because an exception ended the pass."""
        self.at_outer_end.clear()
        self.once_after.clear()
        self.has_outer_end = False


def watch(unfinished: Callable[[], Optional[str]]) -> None:
    """Watch the backward passes of this job, until `cleanup()`. Local.

    Args:
        unfinished: returns the name of a network whose gradients are being sent to other ranks, or None.
    """
    passes = current().part(Passes)
    passes.unfinished = unfinished
    if current().next_number("watched passes") == 0:
        stand_in = _watching(torch.autograd.backward, passes)
        current().at_end.enter_context(replaced(torch.autograd, "backward", stand_in))


def check_step(optimizer: Any) -> None:
    """Raise SyncError if `optimizer` steps inside a backward pass, such as in a hook of a tensor. Local."""
    if current().part(Passes).depth:
        raise SyncError(
            f"{type(optimizer).__name__}.step() inside a backward pass (an optimizer in backward, or a hook that "
            "steps): gradients are not reduced until the pass ends, so ranks would train different models. Step "
            "after loss.backward(), with one optimizer for all parameters (DDPSHIM_GUARD=0 turns this check off)."
        )


def at_end_of_pass(call: Callable[[], None]) -> None:
    """Make the engine run `call` when the current backward pass has computed all gradients. Local."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def at_outer_end(call: Callable[[], None]) -> bool:
    """Run `call` once at the end of the outermost pass: reentrant checkpoints nest passes. Local.

    Return whether this is the first such request for `call` in this pass.
    """
    passes = current().part(Passes)
    if call in passes.at_outer_end:
        return False
    passes.queue_end()
    passes.at_outer_end.append(call)
    return True


def _watching(original: Callable[..., None], passes: Passes) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        if not passes.depth:
            _check(passes)
            passes.losses = args[0] if args else kwargs.get("tensors")
        else:
            with contextlib.suppress(RuntimeError):  # if the outer pass runs in another thread
                passes.queue_end()  # for the outer pass: from now on, callbacks are queued for the inner one
        passes.depth += 1
        try:
            original(*args, **kwargs)
        except BaseException as error:
            passes.drop()
            if passes.depth == 1 and isinstance(error, Exception):
                _explain(passes, error)
            raise
        finally:
            passes.depth -= 1
            if not passes.depth:
                passes.losses = None
        for call in () if passes.depth else passes.after:
            call()
        while passes.once_after and not passes.depth:
            passes.once_after.pop(0)()

    return backward


def _check(passes: Passes) -> None:
    """Raise SyncError if the pass that begins cannot be reduced."""
    if passes.left is not None:
        refusal = SyncError(
            f"a backward pass after one that never finished: {passes.left}, and the program caught the exception. "
            "Other ranks still wait for the rest of that pass's gradients, and would get those of this pass. One "
            "rank cannot repeat a pass: let the exception end the job. If memory ran out, use smaller batches, or "
            "accumulate several per step (net.accumulate)."
        )
        if passes.has_refused:  # and the error was caught: the program would fail on all its batches in this way
            abort(refusal)
        passes.has_refused = True
        raise refusal
    if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False):
        raise _compiled()


def _explain(passes: Passes, error: Exception) -> None:
    """Record an aborted pass; raise SyncError in place of an error of torch that does not say what to do."""
    network = passes.unfinished()
    if network is not None or isinstance(error, SyncError):
        passes.left = f"that of {network or 'a network'} ended with {described(error)}"
    text = str(error)
    if "ready twice" in text:
        found = re.search(r"with name (\S+) has", text)
        which = f"parameter '{found[1]}' of {network}" if found else f"a parameter of {network}"
        raise SyncError(
            f"{which} got a second gradient in one backward pass, after the first was sent to the other ranks: its "
            "layer is used in two parts of the network that are checkpointed with use_reentrant=True, or in one and "
            "outside it. Half of its gradient would be lost. Use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False)."
        ) from error
    if "ompiled autograd" in text:
        raise _compiled() from error
    if "does not require grad and does not have a grad_fn" in text:
        raise SyncError(
            "backward() of a loss that depends on no parameter: it was computed under torch.inference_mode() or "
            "torch.no_grad(), from detached tensors, or only by frozen networks. This rank has no gradients, and "
            "the others would wait for them. Compute the loss of a training step outside these blocks; "
            "inference_mode is for evaluation."
        ) from error


def _compiled() -> SyncError:
    return SyncError(
        "a backward pass under compiled autograd, which runs gradient hooks at tracing and not when gradients are "
        "computed; ranks would train different models. Leave torch._dynamo.config.compiled_autograd off "
        "(torch.compile of the network may stay), even if torch suggests optimize_ddp='python_reducer'."
    )
