"""Prints the documentation pages that the package includes: `python -m ddpshim docs`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddpshim.errors import DdpShimError
from ddpshim.near_names import nearest

if TYPE_CHECKING:
    from ddpshim.arguments import Commands

_PACKAGE = Path(__file__).parents[1]


def all_pages() -> dict[str, Path]:
    """Return page name -> file, from the wheel's `ddpshim/docs` or this checkout's `docs`."""
    folder = next(f for f in (_PACKAGE / "docs", _PACKAGE.parent / "docs") if (f / "launch.md").is_file())
    files = list(folder.glob("*.md"))
    files += [file for file in (folder / "MIGRATION.md", folder.parent / "MIGRATION.md") if file.is_file()]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem.lower())}


def find(name: str) -> Path:
    """Return the file of a page; `name` in any case, also as docs/launch.md.

    Raises DdpShimError, with the nearest name, if there is no such page.
    """
    pages = {known.lower(): file for known, file in all_pages().items()}
    wanted = name.lower().replace("\\", "/").rpartition("/")[2]
    wanted = wanted[:-3] if wanted.endswith(".md") else wanted
    if wanted not in pages:
        near = nearest(wanted, [*pages]) or "."
        error = DdpShimError(f"no page {name!r}{near} Nothing was printed: `python -m ddpshim docs` lists the pages.")
        error.exit_code = 2
        raise error
    return pages[wanted]


def text_of(name: str) -> str:
    """Return the Markdown of a page."""
    return find(name).read_text(encoding="utf-8")


def listed() -> str:
    """Return a line with name and title for each page."""
    pages = all_pages()
    width = max(map(len, pages))
    return "\n".join(f"{name:{width}}  {_title(file)}" for name, file in pages.items())


def _title(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        return next(line for line in lines if line.startswith("# ")).removeprefix("# ").strip()


def add(commands: Commands) -> None:
    """Add the command `docs` to a parser. Local."""
    text = "print a page of the documentation, or list the pages"
    docs = commands.add_parser("docs", help=text, description=text)
    docs.add_argument("page", nargs="?", metavar="PAGE", help="a name from the list, e.g. launch (default: the list)")
    docs.add_argument("--path", action="store_true", dest="shows_path", help="print where the page is, not its text")
    docs.set_defaults(run=_docs)


def _docs(arguments: argparse.Namespace) -> int:
    if arguments.shows_path:
        print(find(arguments.page) if arguments.page else find("launch").parent)
    elif arguments.page is None:
        print(listed())
    elif sys.stdout.isatty():
        import pydoc

        pydoc.pager(text_of(arguments.page))
    else:
        print(text_of(arguments.page), end="")
    return 0
