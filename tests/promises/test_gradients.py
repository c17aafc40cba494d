"""Same gradients: weights after training are those of one process but for rounding, however the optimizer is used.

With shares gradients have the bits of torch's DistributedDataParallel: see tests/same_gradients.
"""

from __future__ import annotations

import pytest

from evidence.compare import largest_difference
from tests.promises.running import result, weights_of

pytestmark = pytest.mark.launch
ACCUMULATED = ("--how", "accumulated,by_momentum,with_critic", "--batch", "7")
CLIPPED = ("--how", "clipped,by_momentum,with_critic", "--drop-last")


@pytest.mark.parametrize(
    ("options", "door", "ranks"),
    [(ACCUMULATED, "", 3), (CLIPPED, "", 2), (CLIPPED, "global", 3)],
)
def test_weights_are_those_of_one_process(options: tuple[str, ...], door: str, ranks: int) -> None:
    one, many = weights_of(result(*options)), weights_of(result(*options, door=door, ranks=ranks))
    assert largest_difference(one, many) < 1e-13


def test_without_a_launcher_the_calls_change_nothing() -> None:
    one = weights_of(result("--batch", "7"))
    for door in ("global", "shares"):
        assert largest_difference(one, weights_of(result("--batch", "7", door=door))) == 0
