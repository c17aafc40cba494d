"""Defines `StandIn`, which replaces an object of the main rank on other ranks: it accepts every call and does
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class StandIn:
    """The object that `World.only_main` returns on ranks other than the main rank.

    Attributes, items and calls return it again; it is empty and false, and as a context manager it lets exceptions
    through. It is not a number, text or path: computing with it, or opening it, raises TypeError.
    """

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copy, pickle, numpy and others look up protocol methods
        return self

    def __setattr__(self, name: str, value: Any) -> None: ...

    def __delattr__(self, name: str) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        return self

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *exception: Any) -> None: ...

    def __getitem__(self, key: Any) -> StandIn:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __delitem__(self, key: Any) -> None: ...

    def __contains__(self, item: Any) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __next__(self) -> Any:
        raise StopIteration

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<stand-in for an object of the main rank>"
