"""Reads zarr replay buffers (diffusion_policy, UMI) into one copy per node, and gives batches of windows from it.

zarr and numpy are imported inside the functions only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from torch.utils.data import Dataset

from ddpshim.data.fetching import WholeBatches
from ddpshim.data.node_memory import SharedArrays, shared_arrays
from ddpshim.errors import DataError

_ENDS = "meta/episode_ends"
_READ_BYTES = 64 << 20  # decompressed bytes per read


class ReplayBuffer(Mapping[str, torch.Tensor]):
    """Steps of all episodes in sequence, by key; all ranks and workers of a node share the memory.

    Attributes:
        episode_ends: for each episode the number of the step after its last one.
    """

    def __init__(self, arrays: SharedArrays) -> None:
        self._arrays = arrays
        self.episode_ends = arrays[_ENDS]

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._arrays[f"data/{key}"]

    def __iter__(self) -> Any:
        return (name[len("data/") :] for name in self._arrays if name != _ENDS)

    def __len__(self) -> int:
        return len(self._arrays) - 1

    def as_root(self) -> dict[str, dict[str, Any]]:
        """Return numpy arrays for diffusion_policy's `ReplayBuffer(root=...)`; nothing is copied."""
        return {
            "data": {key: value.numpy() for key, value in self.items()},
            "meta": {"episode_ends": self.episode_ends.numpy()},
        }


def load_replay_buffer(
    path: str,
    keys: Optional[Sequence[str]] = None,
    *,
    directory: Optional[str] = None,
    budget_bytes: Optional[float] = None,
) -> ReplayBuffer:
    """Return a zarr replay buffer, decompressed, in one copy per node (collective; the same with one process).

    Each rank of a node reads its part. Needs the package `zarr` (any version that reads format 2).

    Args:
        path: the store: a folder, or a file that ends in .zip.
        keys: of `data`; default all.
        directory, budget_bytes: see `shared_arrays`.

    Raises:
        DataError: it is not a replay buffer, a key is missing, or there is no room; on every rank.
    """
    data, ends = _opened(path)
    chosen = sorted(data.keys() if keys is None else keys)
    odd = [key for key in chosen if key not in data]
    if odd:
        raise DataError(f"{path} has no data/{odd[0]}; it has {', '.join(sorted(data.keys()))}. Name keys of these.")
    num_steps = int(ends[-1]) if len(ends) else 0
    short = [key for key in chosen if data[key].shape[0] < num_steps]
    if short or any(ends[:-1] >= ends[1:]) or (len(ends) and ends[0] <= 0):
        what = f"{data[short[0]].shape[0]} steps of {short[0]}" if short else f"{_ENDS} {ends[:8].tolist()}..."
        raise DataError(
            f"{path} has {what}, but its episodes end at step {num_steps}: windows would cross episodes. Write the "
            "file again."
        )
    specs = {f"data/{key}": ((num_steps, *data[key].shape[1:]), _torch_type(path, key, data[key])) for key in chosen}

    def fill(arrays: SharedArrays, part: int, num_parts: int) -> None:
        import numpy as np

        for key in chosen:
            array = data[key]
            row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:]))
            chunk = max(1, int(array.chunks[0]))
            num_rows = max(1, _READ_BYTES // max(1, row_bytes * chunk)) * chunk  # whole chunks
            for start in range(part * num_rows, num_steps, num_parts * num_rows):
                rows = np.ascontiguousarray(array[start : min(start + num_rows, num_steps)])
                arrays.write(f"data/{key}", start * row_bytes, rows)
        if part == 0:
            arrays.write(_ENDS, 0, np.ascontiguousarray(ends, dtype=np.int64))

    made = shared_arrays(
        {**specs, _ENDS: ((len(ends),), torch.int64)}, fill, directory=directory, budget_bytes=budget_bytes
    )
    return ReplayBuffer(made)


def _opened(path: str) -> tuple[Any, Any]:
    """Return the group of arrays in a store, and the ends of its episodes."""
    try:
        import zarr
    except ImportError as error:
        raise DataError(
            f"the package zarr is not installed, so {path} cannot be read. Run: pip install zarr"
        ) from error
    try:
        root = zarr.open(path, mode="r")
        return root["data"], root["meta"]["episode_ends"][:]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            f"{path} is not a replay buffer ({type(error).__name__}: {error}); it should contain data/... and "
            f"{_ENDS}, as diffusion_policy writes them."
        ) from error


def _torch_type(path: str, key: str, array: Any) -> torch.dtype:
    import numpy as np

    try:
        return torch.from_numpy(np.empty(0, array.dtype)).dtype
    except TypeError as error:
        raise DataError(
            f"data/{key} of {path} is of type {array.dtype}, which torch does not support, so it cannot be shared. "
            "Leave it out of keys, or store it as another type."
        ) from error


class Windows(Dataset[dict[str, torch.Tensor]], WholeBatches):
    """Windows of `horizon` steps of a replay buffer, the same as of diffusion_policy's SequenceSampler, in its order.

    A window that begins before its episode, or ends after it, repeats the first or the last step. `make_loader` fetches
    whole batches, with one look-up for each key. Local.

    >>> buffer = {"action": torch.arange(5)}
    >>> windows = Windows(buffer, 3, episode_ends=torch.tensor([2, 5]), pad_before=1, pad_after=1)
    >>> [window["action"].tolist() for window in windows]
    [[0, 0, 1], [0, 1, 1], [2, 2, 3], [2, 3, 4], [3, 4, 4]]

    Args:
        buffer: from `load_replay_buffer`, or any tensors by key (N, ...).
        horizon: T, the number of steps in a window.
        pad_before, pad_after: how many steps a window may extend past the ends of an episode; at most T - 1.
        keys: of the samples; default all.
        first: how many first steps of a window to return, for keys that need no more: {"image": 2}.
        episodes: for each episode, whether its windows are included: a mask for training or validation.
        episode_ends: default those of `buffer`.
    """

    def __init__(
        self,
        buffer: Mapping[str, torch.Tensor],
        horizon: int,
        *,
        pad_before: int = 0,
        pad_after: int = 0,
        keys: Optional[Sequence[str]] = None,
        first: Optional[Mapping[str, int]] = None,
        episodes: Optional[Sequence[bool]] = None,
        episode_ends: Optional[torch.Tensor] = None,
    ) -> None:
        ends = torch.as_tensor(buffer.episode_ends if episode_ends is None else episode_ends)  # type: ignore[attr-defined]
        mask = torch.ones(len(ends), dtype=torch.bool, device="cpu") if episodes is None else torch.as_tensor(episodes)
        odd = [key for key in (*(keys or ()), *(first or ())) if key not in buffer]
        if odd or horizon < 1 or mask.shape != ends.shape:
            raise DataError(
                f"windows of {horizon} steps with keys {odd} that the buffer does not have, for {tuple(mask.shape)} "
                f"of {len(ends)} episodes: the samples would be the wrong ones. Its keys are {', '.join(buffer)}."
            )
        self._buffer, self._keys = buffer, list(buffer if keys is None else keys)
        self._steps = {
            key: torch.arange(min(horizon, (first or {}).get(key, horizon)), device="cpu") for key in self._keys
        }
        before, after = (min(max(pad, 0), horizon - 1) for pad in (pad_before, pad_after))
        begins = torch.cat([ends.new_zeros(min(1, len(ends))), ends[:-1]])
        counts = (ends - begins - horizon + after + before + 1).clamp_min(0) * mask
        episode = torch.repeat_interleave(torch.arange(len(ends), device="cpu"), counts)
        number = torch.arange(len(episode), device="cpu") - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        self._begin, self._last = begins[episode], ends[episode] - 1
        self._start = self._begin - before + number

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[0] for key, value in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the windows with these indices, (B, T, ...) by key. Local."""
        chosen = torch.as_tensor(indices)
        if len(chosen) and not -len(self) <= int(chosen.min()) <= int(chosen.max()) < len(self):
            raise IndexError(f"there are {len(self)} windows")
        start, begin, last = (of[chosen, None] for of in (self._start, self._begin, self._last))
        out = {}
        for key in self._keys:
            rows = (start + self._steps[key]).clamp(begin, last)
            value = self._buffer[key]
            out[key] = value.index_select(0, rows.flatten()).view(*rows.shape, *value.shape[1:])
        return out
