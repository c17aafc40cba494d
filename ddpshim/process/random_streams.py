"""Runs code with random streams of its own, which leave the process's unchanged."""

import contextlib
import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any, Optional

import torch

from ddpshim.process.job import seed_everything
from ddpshim.process.messages import bytes_of

# Open blocks of `shared_random_streams`, the outermost first: each with the seed of this rank's streams at its end.
_blocks: list[Optional[int]] = []


@contextlib.contextmanager
def shared_random_streams(seed: int) -> Iterator[None]:
    """Within the block, all ranks draw the same numbers from `seed`; then each continues its own stream. Local.

    For what must be equal after `split_random_streams`: a network that is built later, a permutation that ranks slice.
    If `split_random_streams` is called in the block, each rank draws from its own new stream afterwards.
    """
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    _blocks.append(None)
    outer = global_states()
    try:
        with torch.random.fork_rng(devices=gpus):
            seed_globals(seed)
            if gpus:
                torch.cuda.manual_seed_all(seed)
            yield
    finally:
        restore_global_states(outer)
        if (own_seed := _blocks.pop()) is not None:
            seed_everything(own_seed)


def seed_own_streams(seed: int) -> None:
    """Seed this rank's own streams now, or at the end of the surrounding `shared_random_streams`. Local."""
    if _blocks:
        _blocks[0] = seed
    else:
        seed_everything(seed)


def global_states() -> dict[str, Any]:
    """Return the states of Python's, torch's (CPU) and, if it is loaded, numpy's global generators. Local."""
    states = {"random": random.getstate(), "torch": torch.default_generator.get_state()}
    # numpy is not imported for this: a process without it has no state of it to protect.
    if "numpy" in sys.modules:
        states["numpy"] = _numpys.state(sys.modules["numpy"].random)
    return states


class _Numpys:
    """The state of numpy's global generator; the last one is returned again while nothing was drawn."""

    bits = b""
    last: Any = ()

    def state(self, random: Any) -> Any:
        generator: Any = random.get_bit_generator() if hasattr(random, "get_bit_generator") else None
        bits = b""
        if type(generator) is random.MT19937:
            bits = ctypes.string_at(generator.ctypes.state_address, 625 * 4)  # its numbers, and the place in them
        # A normal number that is kept for the next draw is not in them.
        if not bits or bits != self.bits or self.last[3]:
            self.bits, self.last = bits, random.get_state()
        return self.last


_numpys = _Numpys()


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names of the states, of two results of `global_states`, that differ, or that `before` lacks. Local."""
    return [name for name in now if name not in before or not is_same_state(before[name], now[name])]


def digest(*names: str) -> str:
    """Return a hash of `global_states`, or of those with these names: it changes with every draw. Local."""
    states = {name: state for name, state in global_states().items() if not names or name in names}
    torchs, numpys = states.pop("torch", None), states.pop("numpy", ((), b""))
    torch_state = b"" if torchs is None else bytes_of(torchs)
    parts = (repr(states).encode(), torch_state, bytes(numpys[1]), repr(numpys[2:]).encode())
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def seed_globals(seed: int) -> None:
    """Seed the generators of `global_states`. Local."""
    random.seed(seed)
    # Not torch.manual_seed, which reseeds the accelerators as well.
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        # From the two words alone numpy would draw the same as Python's generator, hence the 1.
        sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, 1])


def restore_global_states(states: dict[str, Any]) -> None:
    """Restore what `global_states` returned, in this process or an earlier one. Local."""
    if "random" in states:
        random.setstate(states["random"])
    if "torch" in states:
        torch.default_generator.set_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
        _numpys.bits = b""


def rank_states(device: torch.device) -> dict[str, Any]:
    """Return `global_states`, and under "cuda" the state of `device` if it is a GPU, else None. Local."""
    return {**global_states(), "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None}


def is_same_state(one: Any, other: Any) -> bool:
    """Return whether two states of one generator, from `rank_states`, are equal. Local."""
    if one is other or isinstance(one, torch.Tensor):
        return one is other or torch.equal(one, other)
    if isinstance(one, tuple) and len(one) > 1 and hasattr(one[1], "tobytes"):  # numpy's
        return bool(one[2:] == other[2:] and one[1].tobytes() == other[1].tobytes())
    return bool(one == other)


def restore_rank_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore what `rank_states` returned, as far as this process has such generators. Local."""
    restore_global_states(states)
    if device.type == "cuda" and states.get("cuda") is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
