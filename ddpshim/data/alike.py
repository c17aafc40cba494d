"""Compares the ranks' data before training, and refuses differences."""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ddpshim.errors import DataError


def length(sized: Any) -> Optional[int]:
    """Return `len(sized)`, or None if it has no length: some classes have a __len__ that only raises."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def refuse_unlike(facts_of_ranks: Sequence[Mapping[str, Any]], remedy: str) -> None:
    """Raise DataError if a rank's fact differs from rank 0's. Local, on gathered facts, so it raises on every rank."""
    for name in facts_of_ranks[0]:
        values = [facts[name] for facts in facts_of_ranks]
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            raise DataError(
                f"Ranks disagree on the {name}: {values[0]} on rank 0, {values[odd]} on rank {odd}; they would "
                f"train on mismatched batches, or hang. {remedy}"
            )
