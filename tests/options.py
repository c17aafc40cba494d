"""Writes the table of options into docs/options.md: `python -m tests.options`."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from ddpshim.options import Options

PAGE = Path(__file__).parents[1] / "docs" / "options.md"


def page() -> str:
    """Return docs/options.md with the table of the present options. A value is shown as a config would have it."""
    rows = ["| option | variable | default | allowed | effect |", "|---|---|---|---|---|"]
    for f in fields(Options):
        default = "none" if f.default is None else json.dumps(f.default).strip('"')
        allowed, effect = f.metadata["kind"].allowed, f.metadata["effect"]
        rows.append(f"| `{f.name}` | `DDPSHIM_{f.name.upper()}` | {default} | {allowed} | {effect} |")
    before, _, rest = PAGE.read_text().partition("| option |")
    return before + "\n".join(rows) + "\n" + rest[rest.index("\n\n") + 1 :]


if __name__ == "__main__":
    PAGE.write_text(page())
