"""Lists the options of a run, as a Markdown table or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ddpshim.options import Options
from ddpshim.variables import PREFIX

if TYPE_CHECKING:
    from ddpshim.arguments import Commands


def as_json() -> Iterator[dict[str, Any]]:
    """Yield a description of each option."""
    for f in fields(Options):
        about = {"option": f.name, "variable": f"{PREFIX}{f.name.upper()}", "default": f.default}
        yield {**about, "allowed": f.metadata["kind"].allowed, "effect": f.metadata["effect"]}


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table of all options."""
    yield "| option | variable | default | allowed | effect |"
    yield "|---|---|---|---|---|"
    for f in as_json():
        default = "none" if f["default"] is None else json.dumps(f["default"]).strip('"')
        yield f"| `{f['option']}` | `{f['variable']}` | {default} | {f['allowed']} | {f['effect']} |"


def add(commands: Commands) -> None:
    """Add the command `options` to a parser. Local."""
    text = "list all options of a run, as a Markdown table"
    parser = commands.add_parser("options", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=_options)


def _options(arguments: argparse.Namespace) -> int:
    print(json.dumps([*as_json()], indent=2) if arguments.json else "\n".join(table()))
    return 0
