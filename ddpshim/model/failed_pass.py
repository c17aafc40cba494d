"""Explains errors of torch in a backward pass that do not say what to do."""

from __future__ import annotations

import re
from typing import NoReturn, Optional

from ddpshim.errors import SyncError


def explain(network: Optional[str], error: Exception) -> None:
    """Raise SyncError in place of an error of torch that does not say what to do. Local."""
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
        refuse_compiled(error)
    if "does not require grad and does not have a grad_fn" in text:
        raise SyncError(
            "backward() of a loss that depends on no parameter: it was computed under torch.inference_mode() or "
            "torch.no_grad(), from detached tensors, or only by frozen networks. This rank has no gradients, and "
            "the others would wait for them. Compute the loss of a training step outside these blocks; "
            "inference_mode is for evaluation."
        ) from error


def refuse_compiled(error: Optional[Exception]) -> NoReturn:
    """Raise SyncError: gradient hooks run when compiled autograd traces. Local."""
    raise SyncError(
        "a backward pass under compiled autograd, which runs gradient hooks at tracing and not when gradients are "
        "computed; ranks would train different models. Leave torch._dynamo.config.compiled_autograd off "
        "(torch.compile of the network may stay), even if torch suggests optimize_ddp='python_reducer'."
    ) from error
