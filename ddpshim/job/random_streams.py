"""Derives seeds, and gives code random streams that leave the process's own unchanged."""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any, Optional, Union

import torch


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), random, and numpy where it is loaded. Local."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def derive_seed(seed: int, *scope: Union[int, str]) -> int:
    """A 63-bit seed derived from `seed` and a purpose, the same on every machine. Local.

    >>> derive_seed(1, "noise", 0) != derive_seed(1, "noise", 1)
    True
    """
    text = "/".join(str(part) for part in (seed, *scope)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@contextlib.contextmanager
def shared_random_streams(seed: int) -> Iterator[None]:
    """Inside, all ranks draw the same numbers from `seed`; afterwards each continues its own stream. Local.

    For a network that is built after `wrap_parallel` gave every rank its own streams. If the process's first
    `wrap_parallel` is inside, each rank draws from its own stream afterwards.
    """
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    _shared.depth += 1
    try:
        with torch.random.fork_rng(devices=gpus), PrivateRandom(seed).swapped_in():
            if gpus:
                torch.cuda.manual_seed_all(seed)
            yield
    finally:
        _shared.depth -= 1
        if not _shared.depth and _shared.own_seed is not None:
            own_seed, _shared.own_seed = _shared.own_seed, None
            seed_everything(own_seed)


def seed_own_streams(seed: int) -> None:
    """Seed this rank's own streams; inside `shared_random_streams`, when that ends. Local."""
    if _shared.depth:
        _shared.own_seed = seed
    else:
        seed_everything(seed)


class _Shared:
    """The scopes of `shared_random_streams` that are open, and what their end would undo."""

    depth = 0
    own_seed: Optional[int] = None


_shared = _Shared()


class PrivateRandom:
    """One consumer's view of Python's, torch's (CPU) and numpy's global generators.

    Code that draws from the global generators runs inside :meth:`swapped_in`. It finds them seeded from `seed`, or as
    it last left them; afterwards the process's own states are restored. Local.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: Optional[dict[str, Any]] = None

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Make the global generators this consumer's own until the block is left."""
        outer = global_states()
        if self._states is None:
            seed_globals(self._seed)
        else:
            restore_global_states(self._states)
        try:
            yield
        finally:
            self._states = global_states()
            restore_global_states(outer)


def global_states() -> dict[str, Any]:
    """The states of Python's, torch's (CPU) and, where it is loaded, numpy's global generators. Local."""
    states = {"random": random.getstate(), "torch": torch.default_generator.get_state()}
    # numpy is not imported for this: a process without it has no global state of it to protect.
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def digest() -> str:
    """A hash of `global_states`: it changes with every draw. Local."""
    states = global_states()
    torch_state = states.pop("torch").numpy().tobytes() if "numpy" in states else bytes(states.pop("torch").tolist())
    numpys = states.pop("numpy", ((), b""))
    parts = (repr(states).encode(), torch_state, bytes(numpys[1]), repr(numpys[2:]).encode())
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def seed_globals(seed: int) -> None:
    """Seed what `global_states` returns. Local."""
    random.seed(seed)
    # Not torch.manual_seed, which reseeds the accelerators as well.
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, 1])  # Python's has the two


def restore_global_states(states: dict[str, Any]) -> None:
    """Restore what `global_states` returned, in this process or an earlier one. Local."""
    if "random" in states:
        random.setstate(states["random"])
    if "torch" in states:
        torch.default_generator.set_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])


def rank_states(device: torch.device) -> dict[str, Any]:
    """`global_states`, and under "cuda" that of `device` where it is a GPU, else None. Local."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {**global_states(), "cuda": cuda}


def is_same_state(one: Any, other: Any) -> bool:
    """Whether two of the states in `rank_states`, of one generator, are equal. Local."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and len(one) > 1 and hasattr(one[1], "tobytes"):  # numpy's
        return bool(one[2:] == other[2:] and one[1].tobytes() == other[1].tobytes())
    return bool(one == other)


def restore_changed_states(now: dict[str, Any], states: dict[str, Any], device: torch.device) -> None:
    """`restore_rank_states` from `now`, where what did not change is the same object in both. Local."""
    restore_rank_states({name: state for name, state in states.items() if now.get(name) is not state}, device)


def restore_rank_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore what `rank_states` returned, as far as this process has such generators. Local."""
    restore_global_states(states)
    if device.type == "cuda" and states.get("cuda") is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
