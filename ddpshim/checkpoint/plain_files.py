"""Packs and reads files of plain values and tensors only, so that reading them cannot run code.

Objects that need pickle are refused, unless the option `trust_progress` allows them.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from ddpshim.checkpoint.files import PathLike
from ddpshim.errors import CheckpointError
from ddpshim.process import messages
from ddpshim.process.random_streams import restore_rank_states

_OUTLINE, _TENSORS = "outline", "tensors"
_ALLOW = "DDPSHIM_TRUST_PROGRESS=yes allows it, and whoever can write to that folder then runs code in the job"


def content(value: Any, path: PathLike, is_trusted: bool) -> dict[str, Any]:
    """Return `value` in the form for `torch.save` to `path`. Local; tensors are not copied.

    Raises CheckpointError if a part of it needs pickle and `is_trusted` is False.
    """
    try:
        outline, tensors = messages.take_apart(value, pickle.dumps if is_trusted else None)
    except messages.NotPlain as error:
        raise CheckpointError(
            f"{path} would hold an object: {error}; reading it could run code that someone put into the file. Keep "
            f"numbers, text, tensors and arrays. {_ALLOW}."
        ) from None
    return {_OUTLINE: outline, _TENSORS: tensors}


def read(path: PathLike, is_trusted: bool) -> Any:
    """Return the value whose `content` was written to `path`, with tensors on the CPU. Local.

    Raises CheckpointError if the file cannot be read or has another format, or needs pickle and is not trusted.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        return messages.put_together(found[_OUTLINE], found[_TENSORS], pickle.loads if is_trusted else None)
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


def restore_streams(states: Any, device: torch.device, path: PathLike) -> None:
    """Restore random states that were read from `path`. Local. Raises CheckpointError if they are invalid."""
    try:
        restore_rank_states(states, device)
    except Exception as error:  # generators raise different types for an invalid state
        raise CheckpointError(
            f"{path} holds no states of random generators ({type(error).__name__}: {str(error)[:160]}); the noise "
            "would differ. Remove it."
        ) from error
