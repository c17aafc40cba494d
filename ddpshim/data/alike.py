"""Compares what ranks have before they train on it, and refuses what differs."""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ddpshim.errors import DataError


def length(sized: Any) -> Optional[int]:
    """Return its length, or None where it has none: some classes have a __len__ that only raises."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def refuse_unlike(facts_of_ranks: Sequence[Mapping[str, Any]], remedy: str) -> None:
    """Raise DataError where a rank's fact is not rank 0's. Local, of what all have gathered: so on every rank."""
    for name in facts_of_ranks[0]:
        values = [facts[name] for facts in facts_of_ranks]
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            raise DataError(
                f"Ranks disagree on the {name}: {values[0]} on rank 0, {values[odd]} on rank {odd}; they "
                f"would step on batches that do not belong together, or wait for each other. {remedy}"
            )
