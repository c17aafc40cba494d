"""Names of other packages come back as they were."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types

import pytest
from torch import nn

from ddpshim.process.observed import live_modules
from ddpshim.process.replaced import noted, replaced
from ddpshim.trainers.unedited.file_calls import in_place


class Base:
    def name(self) -> str:
        return "base"


class Derived(Base):
    @staticmethod
    def save() -> str:
        return "theirs"


def test_a_name_comes_back_also_where_the_block_raises() -> None:
    before, seen = vars(Derived)["save"], []

    def raises() -> None:
        with replaced(Derived, "save", staticmethod(lambda: "ours")) as original:
            seen.append((Derived.save(), original()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raises()
    assert seen == [("ours", "theirs")]
    assert vars(Derived)["save"] is before, "a static method stays one"


def test_what_was_inherited_or_absent_is_so_again() -> None:
    with replaced(Derived, "name", lambda self: "ours"), replaced(Derived, "new", 1) as before:
        assert (Derived().name(), Derived.new, before) == ("ours", 1, None)  # type: ignore[attr-defined]
    assert Derived().name() == "base"
    assert not {"name", "new"} & vars(Derived).keys()


@pytest.mark.parametrize("value", [True, "a text"])
def test_only_functions_and_classes_are_replaced_where_they_were_imported(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that is replaced in one module may be in any other, for another reason. Of several stand-ins for one
    function, the last is found."""
    library, program = types.ModuleType("library"), types.ModuleType("program")
    monkeypatch.setitem(sys.modules, "program", program)
    library.switch = program.residual = value  # type: ignore[attr-defined]
    library.save = program.save = lambda: "theirs"  # type: ignore[attr-defined]
    library.Loader = program.Loader = Base  # type: ignore[attr-defined]
    names = ("switch", False), ("save", lambda: "first"), ("save", lambda: "last"), ("Loader", Derived)
    with contextlib.ExitStack() as until:
        with noted() as stand_ins:
            for name, instead in names:
                until.enter_context(replaced(library, name, instead))
        until.enter_context(in_place(stand_ins))
        assert (program.residual, program.save(), program.Loader) == (value, "last", Derived)
        assert library.switch is False  # type: ignore[attr-defined]
    assert (program.save(), program.Loader) == ("theirs", Base)


def test_modules_are_found_while_another_thread_builds_tuples() -> None:
    """A list of all objects that is alive while a tuple grows is a SystemError in its thread: seen on a GPU, where
    torch's thread for pinned memory builds batches."""
    errors, is_over, net = list[Exception](), threading.Event(), nn.Linear(2, 2)

    def build() -> None:
        while not is_over.is_set():
            try:
                tuple(time.sleep(0) or i for i in range(20))
            except SystemError as error:
                errors.append(error)

    assert tuple(i for i in range(20) if i or any(one is net for one in live_modules())) == tuple(range(20))
    thread = threading.Thread(target=build)
    thread.start()
    kept = [[i] for i in range(100_000)]  # a search takes longer than a thread's turn
    found = [live_modules() for _ in range(5)]
    is_over.set()
    thread.join()
    assert kept
    assert all(any(one is net for one in modules) for modules in found)
    assert not errors
