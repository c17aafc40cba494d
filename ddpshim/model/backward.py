"""Tracks the program's backward passes: refuses those that cannot be reduced, and says when one begins and ends."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import SyncError
from ddpshim.failures.failure import abort
from ddpshim.process.job import current
from ddpshim.process.job_store import claim
from ddpshim.process.observed import Progress
from ddpshim.process.replaced import replaced
from ddpshim.process.say import described, say


class Passes:
    """The backward passes (calls of torch.autograd.backward) of a job, from when this is made until `cleanup()`."""

    def __init__(self) -> None:
        current().at_end.enter_context(replaced(torch.autograd, "backward", _watching(torch.autograd.backward, self)))
        self.depth = 0  # more than 1 with reentrant checkpoints, whose passes are nested
        self.losses: Any = None  # of the outermost pass that is under way
        self.keeps_graph = False  # whether that pass has create_graph
        self.before: list[Callable[[], None]] = []  # called before each outermost pass
        self.after: list[Callable[[], None]] = []  # called after each outermost pass, as a part of it: gradients' means
        self.at_end: list[Callable[[], None]] = []  # called after these
        self.once_after: list[Callable[[], None]] = []  # called after the outermost pass that is under way
        # Returns the name of a network whose gradients are being sent to other ranks; None if there is none.
        self.unfinished: Callable[[], Optional[str]] = lambda: None
        self.left: Optional[str] = None  # the pass that an exception aborted
        self.has_nan = False
        self.has_refused = False


def _look_for_nan(losses: Any, num_passes: int) -> None:
    """Look at the losses of pass `num_passes`. Local. Not at those on a GPU, for which the host would wait."""
    for loss in [losses] if isinstance(losses, torch.Tensor) else losses or ():
        if type(loss) is torch.Tensor and loss.device.type == "cpu" and loss.numel() == 1:
            number = loss.item()
            if number != number:
                say_nan(f"the loss is NaN in backward pass {num_passes}")


def say_nan(what: str) -> None:
    """Print `what` once in the job, on the main rank: that a number is NaN, and when; adds the user's line. Local.

    If ranks compute losses of their own, the first one with NaN is named. The main rank gets NaN by its gradients.
    """
    job, passes = current(), current().part(Passes)
    if passes.has_nan or job.world is None:
        return
    from ddpshim.process.users_line import users_line

    passes.has_nan = True
    said = f"{what} ({users_line()})"
    if not job.door.computes_alike and job.store is not None:
        rank = str(job.world.rank)
        job.store.set(f"NaN/{rank}", f"on rank {rank}, {said}")
        said = job.store.get(f"NaN/{claim(job.store, 'NaN', rank)}").decode()
    if job.world.is_main:
        say(f"{said}. The training goes on, as in one process")


def _watching(original: Callable[..., None], passes: Passes) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        if not passes.depth:
            check(passes)
            passes.losses = args[0] if args else kwargs.get("tensors")
            passes.keeps_graph = bool(args[3] if len(args) > 3 else kwargs.get("create_graph"))
            number = current().part(Progress).num_passes + 1
            for call in passes.before:
                call()
            current().part(Progress).is_reducing = True
        passes.depth += 1
        try:
            original(*args, **kwargs)
            if passes.depth == 1:
                for call in (*passes.after, *passes.at_end):
                    call()
                _look_for_nan(passes.losses, number)
        except BaseException as error:
            passes.once_after.clear()
            if passes.depth == 1 and isinstance(error, Exception):
                _explain(passes, error)
            raise
        finally:
            passes.depth -= 1
            if not passes.depth:
                passes.losses, current().part(Progress).is_reducing = None, False
        while passes.once_after and not passes.depth:
            passes.once_after.pop(0)()

    return backward


def check(passes: Passes) -> None:
    """Raise SyncError if the pass that begins cannot be reduced. Local."""
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
    if passes.keeps_graph and network is not None and not current().door.computes_alike:
        raise second_derivatives(network) from error
    if "ready twice" in text or "ready only once" in text:  # torch's reducer
        found = re.search(r"with name (\S+) has", text)
        which = f"parameter '{found[1]}' of {network}" if found else f"a parameter of {network}"
        raise second_gradient(which) from error
    if "ompiled autograd" in text:
        raise _compiled() from error
    if "does not require grad and does not have a grad_fn" in text:
        raise SyncError(
            "backward() of a loss that depends on no parameter: it was computed under torch.inference_mode() or "
            "torch.no_grad(), from detached tensors, or only by frozen networks. This rank has no gradients, and "
            "the others would wait for them. Compute the loss of a training step outside these blocks; "
            "inference_mode is for evaluation."
        ) from error


def second_gradient(which: str) -> SyncError:
    """Return the error for a parameter with two gradients in one pass, of which the reducer sent the first. Local."""
    return SyncError(
        f"{which} got a second gradient in one backward pass, after the first was sent to the other ranks: its layer "
        "is used again in a pass inside this one (parts checkpointed with use_reentrant=True, an autograd.Function "
        "that calls backward). Half of its gradient would be lost. Use torch.utils.checkpoint.checkpoint(..., "
        "use_reentrant=False)."
    )


def second_derivatives(network: str) -> SyncError:
    """Return the error for a pass with create_graph over a share of the batch. Local."""
    return SyncError(
        f"backward(create_graph=True) of {network} on a local batch: second derivatives would differ between "
        'ranks. Use setup(batch="global"); a penalty on gradients of inputs only needs '
        "torch.autograd.grad(..., create_graph=True), then backward()."
    )


def _compiled() -> SyncError:
    return SyncError(
        "a backward pass under compiled autograd, which runs gradient hooks at tracing and not when gradients are "
        "computed; ranks would train different models. Leave torch._dynamo.config.compiled_autograd off "
        "(torch.compile of the network may stay), even if torch suggests optimize_ddp='python_reducer'."
    )
