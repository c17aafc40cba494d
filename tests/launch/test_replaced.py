"""Names of other packages come back as they were."""

from __future__ import annotations

import types

import pytest

from ddpshim.process.replaced import replaced


class Base:
    def name(self) -> str:
        return "base"


class Derived(Base):
    pass


def test_a_name_comes_back_also_where_the_block_raises() -> None:
    module = types.ModuleType("other")
    module.save = before = lambda: "theirs"  # type: ignore[attr-defined]
    seen = []

    def raises() -> None:
        with replaced(module, "save", lambda: "ours") as original:
            seen.append((module.save(), original()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raises()
    assert seen == [("ours", "theirs")]
    assert module.save is before


def test_what_was_inherited_or_absent_is_so_again() -> None:
    with replaced(Derived, "name", lambda self: "ours"), replaced(Derived, "new", 1) as before:
        assert (Derived().name(), Derived.new, before) == ("ours", 1, None)  # type: ignore[attr-defined]
    assert Derived().name() == "base"
    assert not {"name", "new"} & vars(Derived).keys()


def test_a_static_method_stays_one() -> None:
    class Reader:
        @staticmethod
        def read() -> str:
            return "theirs"

    with replaced(Reader, "read", staticmethod(lambda: "ours")):
        assert Reader.read() == "ours"
    assert isinstance(vars(Reader)["read"], staticmethod)
