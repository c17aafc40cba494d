"""Computes any position of a random order on demand, without storing the order."""

from __future__ import annotations

from typing import Union, overload

import torch

from ddpshim.job.random_streams import derive_seed

NUM_AT_ONCE = 2**15  # torch would split the computation of more over threads
_SIGN = torch.tensor(63, device="cpu")
_NUM_ROUNDS = 6  # tests/shuffle_quality.py finds nothing wrong with 6, and much with 4
_LOW_31 = 2**31 - 1


class Computed:
    """A sequence of ints, of which a slice costs the time and the memory of its own length. Local."""

    def __len__(self) -> int:
        raise NotImplementedError

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return what stands at `positions`, which are int64 on the CPU and all inside."""
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

    A Feistel network of six rounds on pairs (left, right), of which there are a few more than `size`; a number that
    ends beyond goes through once more, until it is back (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"). There are a power of two rights, about root(size), so less than one number in root(size) has to.

    >>> Permutation(10**12, key=1)[10**11 : 10**11 + 3].tolist()
    [753424390203, 737081002418, 66540738387]

    Args:
        size: at most 2**58: all is done in whole numbers below 2**63. A few thousand are sorted better by random keys.
        key: any int.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        num_bits = max((size - 1).bit_length(), 2)
        right_bits, left_bits = num_bits // 2, num_bits - num_bits // 2
        # A round reads one half, v. It squares v * factor + offset, which is below 2**31, and takes as many bits as the
        # other half needs from the middle: to those all bits of v have come, and they are not linear in v.
        below_right, up_to_left = 31 - right_bits // 2, min(31 + left_bits // 2, 62 - left_bits)
        # As tensors, for torch would make one of an int each time.
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
        """Return what stands at `positions`, which are int64 on the CPU and all inside."""
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
                # The lower bits are a fraction; so much of the number of lefts, minus left, modulo that number.
                mixed.bitwise_and_(self._fractions).mul_(self._num_lefts).bitwise_right_shift_(self._up_to_left)
                left = mixed.sub_(left)
                left += (left >> _SIGN).bitwise_and_(self._num_lefts)
        return left.bitwise_left_shift_(self._right_bits).bitwise_or_(right)


def _on_cpu(number: int) -> torch.Tensor:
    return torch.tensor(number, device="cpu")
