"""Defines the parser of command lines, which suggests the nearest word for a wrong one, and types of arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Optional, Union

from ddpshim.lazy import nearest

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]


class Parser(argparse.ArgumentParser):
    """An argparse parser with torchrun's spellings and suggestions, for the command and its sub-commands.

    Options also work in torchrun's spelling (`--nproc_per_node`); abbreviations do not. A wrong option or command
    prints the usage of the sub-command and the nearest name. A group without a command prints its help.
    """

    def __init__(self, *args: Any, is_group: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._is_group = is_group

    def parse_known_args(self, args: Optional[Sequence[str]] = None, namespace: Any = None) -> Any:  # type: ignore[override]
        options = self._option_string_actions
        for name in [*options]:
            options.setdefault(re.sub(r"(?<=\w)-", "_", name), options[name])
        if self._is_group and not args:
            self.print_help()
            self.exit()
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            name = rest[0].partition("=")[0]
            known = [option for option in options if "_" not in option]
            self.error(f"unrecognized arguments: {' '.join(rest)}{nearest(name, known)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        super().error(message + ("" if wrong is None else nearest(wrong[1], re.findall(r"[\w-]+", wrong[2]))))


def natural(text: str, least: int = 0) -> int:
    """A whole number from 0 up."""
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number of at least {least}")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1 up."""
    return natural(text, least=1)


def port(text: str) -> int:
    """The number of a port."""
    if not 1 <= natural(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; ports are 1 to 65535")
    return int(text)


def nproc(text: str) -> str:
    """A number of ranks, or one of torchrun's words: auto, gpu, cpu, xpu."""
    if text in ("auto", "gpu", "cpu", "xpu"):
        return text
    try:
        return str(positive(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor gpu, cpu or auto") from None


def steps(text: str) -> Union[int, tuple[int, int]]:
    """A number of steps from 1 up, or with a colon the first and the last one."""
    first, colon, last = text.partition(":")
    return (natural(first), positive(last)) if colon else positive(text)
