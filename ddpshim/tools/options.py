"""Lists the options of a run: as a Markdown table, and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ddpshim.options import Options
from ddpshim.variables import PREFIX


def as_json() -> Iterator[dict[str, Any]]:
    """What may be chosen, an option each."""
    for f in fields(Options):
        about = {"option": f.name, "variable": f"{PREFIX}{f.name.upper()}", "default": f.default}
        yield {**about, "allowed": f.metadata["kind"].allowed, "effect": f.metadata["effect"]}


def table() -> Iterator[str]:
    """The lines of a Markdown table of all options."""
    yield "| option | variable | default | allowed | effect |"
    yield "|---|---|---|---|---|"
    for f in as_json():
        default = "none" if f["default"] is None else json.dumps(f["default"]).strip('"')
        yield f"| `{f['option']}` | `{f['variable']}` | {default} | {f['allowed']} | {f['effect']} |"
