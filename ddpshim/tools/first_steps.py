"""The commands for first steps: `docs` prints pages, `example` writes a config for the released robomimic and its data.

Neither imports torch.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddpshim.errors import TargetError
from ddpshim.lazy import nearest
from ddpshim.process.say import say

CONFIG, DATA = "lift_bc.json", "lift_scripted200_train.hdf5"
_HOMES = ("lift", "../../examples/data")  # in a wheel, and in a checkout


def add(commands: Any) -> None:
    """Add the commands `example` and `docs` to a parser. Local."""
    text = "write a config of robomimic and its data, to try ddpshim with"
    example = commands.add_parser("example", help=text, description=text, example="--out try")
    example.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="for the two files (here)")
    example.set_defaults(run=_example)
    text = "print a page of the documentation, or the headings nearest to some words, or list the pages"
    docs = commands.add_parser("docs", help=text, description=text, example="out of memory")
    text = "a name from the list, e.g. launch (default: the list), or what you look for, e.g. slow"
    docs.add_argument("words", nargs="*", metavar="WORDS", help=text)
    docs.set_defaults(run=_docs)


def _example(arguments: argparse.Namespace) -> int:
    """Write the config, which works from any folder, and its data; print the commands that train on them.

    Raises TargetError, and writes nothing, if a config with other contents exists.
    """
    home = next(path for name in _HOMES if (path := Path(__file__).parent / name).is_dir())
    folder = arguments.out.expanduser().resolve()
    settings = json.loads((home / CONFIG).read_text(encoding="utf-8"))
    settings["train"].update(data=str(folder / DATA), output_dir=str(folder / "lift_bc"))
    text = json.dumps(settings, indent=4) + "\n"
    config = folder / CONFIG
    if config.exists() and config.read_text(encoding="utf-8", errors="replace") != text:
        raise TargetError(
            f"{config} exists and is another one: your changes would be lost, so nothing was written. Move it, or "
            "give another folder with --out."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATA).write_bytes((home / DATA).read_bytes())
    config.write_text(text, encoding="utf-8")
    train = f"-m robomimic.scripts.train --config {shlex.quote(str(_from_here(config)))}"
    # robomimic writes below the experiment's name, and deletes an earlier run of that name.
    one, ranks = (shlex.quote(str(_from_here(folder / "lift_bc" / name))) for name in ("plain", "lift_bc"))
    print(
        f"wrote {_from_here(config)}, a config for robomimic, and {DATA}, 200 demonstrations of its task Lift.",
        *([] if find_spec("robomimic") else ["Install robomimic first: python -m ddpshim docs start"]),
        "Train on 2 ranks, then in one process, and compare the two:",
        f"  python -m ddpshim run --nproc 2 {train}",
        f"  python {train} --name plain",
        f"  python -m ddpshim report {one} {ranks} --markdown",  # the page needs plotly
        f"Checkpoints go into {_from_here(folder / 'lift_bc')}.",
        sep="\n",
    )
    return 0


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def pages() -> dict[str, Path]:
    """Return page name -> file, from the wheel's `ddpshim/docs` or this checkout's `docs`."""
    package = Path(__file__).parents[1]
    folder = next(f for f in (package / "docs", package.parent / "docs") if (f / "launch.md").is_file())
    found = [*folder.glob("*.md"), *folder.parent.glob("MIGRATION.md")]
    return {file.stem: file for file in sorted(found, key=lambda file: file.stem.lower())}


# What people look for: a word of the heading that has the answer. Short words say nothing.
_OF_HEADINGS = {"slow": "faster", "slower": "faster", "speed": "faster", "speedup": "faster", "stuck": "hang"}
_OF_HEADINGS |= {"deadlock": "hang", "timeout": "hang", "pdb": "debugger", "fsdp": "sharding"}
_UNSAID = {"a", "and", "does", "how", "i", "in", "is", "it", "my", "not", "of", "on", "the", "to", "what", "why"}


def _docs(arguments: argparse.Namespace) -> int:
    known, words = pages(), arguments.words
    if not words:
        print(*known, sep="\n")
    elif " ".join(words) in known:
        print(known[words[0]].read_text(encoding="utf-8"), end="")
    else:
        found = _headings(known, [word.lower() for word in words])
        if not found:
            near = nearest(words[0], [*known]) or "."
            say(f"no page matches {' '.join(words)!r}{near} Use other words; `python -m ddpshim docs` lists all pages.")
            return 2
        for page, heading, text in found:
            print(f"{page}: {heading}\n    {text}")
        print(f"\nThe whole page: python -m ddpshim docs {found[0][0]}")
    return 0


def _headings(known: dict[str, Path], words: list[str]) -> list[tuple[str, str, str]]:
    """Return (page, heading, beginning of the text) of the three headings that say most of `words`. Local."""
    stems = [re.escape(_OF_HEADINGS.get(word, word)[:5].rstrip("s")) for word in words if word not in _UNSAID]
    patterns = [re.compile(rf"(?<![a-z]){stem}", re.IGNORECASE) for stem in stems]
    # The first cell of a table's row, and the bold beginning of a paragraph, are nearly headings.
    begins = r"^(?:\| |(?:- )?\*\*)([^|*]*[^a-z|*])??"
    of_rows = [re.compile(f"{begins}{stem}.*", re.IGNORECASE | re.MULTILINE) for stem in stems]
    found = []
    for page, file in known.items():
        text = re.sub(r"(?ms)^```.*?^```\n", "", file.read_text(encoding="utf-8"))
        parts = re.split(r"(?m)^#+ (.+)\n+", text)
        for heading, body in zip(parts[1::2], parts[2::2]):
            if not all(pattern.search(f"{heading} {body}") for pattern in patterns):
                continue
            by_word = ([*of_row.finditer(body)] for of_row in of_rows)
            rows = [min(of_word, key=lambda row: len(row[1] or "")) for of_word in by_word if of_word]
            num_in_heading = sum(pattern.search(heading) is not None for pattern in patterns)
            num_in_body = sum(min(4, len(pattern.findall(body))) for pattern in patterns)
            of_page = 9 * bool(rows) if heading == "Glossary" else -4 * (page in ("decisions", "from_other_guides"))
            points = 9 * num_in_heading + 5 * len(rows) + num_in_body + of_page
            shown = rows[0][0] if rows and not num_in_heading else body
            found.append((points, page, heading, textwrap.shorten(shown, 300, placeholder=" ...")))
    return [one[1:] for one in sorted(found, key=lambda one: -one[0])[:3]] if patterns else []
