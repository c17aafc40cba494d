"""Computes any position of a random order on demand, without storing the order."""

from __future__ import annotations

from typing import Union, overload

import torch

from ddpshim.job.seeds import derive_seed

NUM_AT_ONCE = 2**15  # for more, torch would start several threads
_SIGN = torch.tensor(63, device="cpu")
_NUM_ROUNDS = 6  # tests/shuffle_quality.py finds no fault with 6, and many with 4
_LOW_31 = 2**31 - 1


class Computed:
    """A sequence of ints that are computed on access; a slice takes time and memory for its own length only. Local."""

    def __len__(self) -> int:
        raise NotImplementedError

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the values at `positions`, which are int64 on the CPU and all in range."""
        raise NotImplementedError

    @overload
    def __getitem__(self, where: int) -> int: ...
    @overload
    def __getitem__(self, where: slice) -> torch.Tensor: ...
    def __getitem__(self, where: Union[int, slice]) -> Union[int, torch.Tensor]:
        if isinstance(where, slice):
            return self.at(torch.arange(*where.indices(len(self)), device="cpu"))
        return int(self.at(torch.tensor([range(len(self))[where]], device="cpu")))


class Permutation(Computed):
    """A shuffle of range(size): the same for the same `key` on every machine and with every torch.

    A Feistel network of six rounds on pairs (left, right). There are slightly more pairs than `size`, so a result
    beyond `size` goes through the network again until it is below (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains"). There are a power of two rights, about root(size), so under one number in root(size) needs that.

    >>> Permutation(10**12, key=1)[10**11 : 10**11 + 3].tolist()
    [753424390203, 737081002418, 66540738387]

    Args:
        size: at most 2**58, as all numbers stay below 2**63. For a few thousand, sorting by random keys is better.
        key: any int.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        num_bits = max((size - 1).bit_length(), 2)
        right_bits, left_bits = num_bits // 2, num_bits - num_bits // 2
        # A round reads one half, v. It squares v * factor + offset, which is below 2**31, and takes as many bits as the
        # other half needs from the middle: those depend on all bits of v, and not linearly.
        below_right, up_to_left = 31 - right_bits // 2, min(31 + left_bits // 2, 62 - left_bits)
        # As tensors, because torch would convert an int at each use.
        self._right_bits, self._rights = _on_cpu(right_bits), _on_cpu(2**right_bits - 1)
        self._below_right = _on_cpu(below_right)
        self._num_lefts = _on_cpu(-(-size >> right_bits))
        self._up_to_left, self._fractions = _on_cpu(up_to_left), _on_cpu(2**up_to_left - 1)
        widths = right_bits, left_bits
        self._rounds = []
        for number in range(_NUM_ROUNDS):
            top = 29 - widths[number % 2]
            factor = derive_seed(key, "factor", number) % 2**top | 2**top | 1
            self._rounds.append((factor, _on_cpu(derive_seed(key, "offset", number) % 2**30)))

    def __len__(self) -> int:
        return self._size

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the values at `positions`, which are int64 on the CPU and all in range."""
        found = self._once(positions)
        while len(found) and int(found.max()) >= self._size:
            (beyond,) = torch.nonzero(found >= self._size, as_tuple=True)
            found[beyond] = self._once(found[beyond])
        return found

    def _once(self, numbers: torch.Tensor) -> torch.Tensor:
        left, right = numbers >> self._right_bits, numbers & self._rights
        for number, (factor, offset) in enumerate(self._rounds):
            mixed = torch.add(offset, left if number % 2 else right, alpha=factor)
            mixed.mul_(mixed)
            if number % 2:
                right ^= mixed.bitwise_right_shift_(self._below_right).bitwise_and_(self._rights)
            else:
                # The lower bits are a fraction; left becomes (fraction * num_lefts - left) modulo num_lefts.
                mixed.bitwise_and_(self._fractions).mul_(self._num_lefts).bitwise_right_shift_(self._up_to_left)
                left = mixed.sub_(left)
                left += (left >> _SIGN).bitwise_and_(self._num_lefts)
        return left.bitwise_left_shift_(self._right_bits).bitwise_or_(right)


def _on_cpu(number: int) -> torch.Tensor:
    return torch.tensor(number, device="cpu")
