"""The commands for first steps: `docs` prints pages, `example` writes a config for the released robomimic and its data.

Neither imports torch.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

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
    """Return page name -> file, from the wheel's `ddpshim` or this checkout: those in `docs`, and those beside it."""
    package = Path(__file__).parents[1]
    home = next(folder for folder in (package, package.parent) if (folder / "docs" / "launch.md").is_file())
    found = {file.stem: file for file in (home / "docs").glob("*.md")}
    others = ("MIGRATION", "README", *(f"{folder}/README" for folder in ("examples", "patches")))
    found.update((name, home / f"{name}.md") for name in others)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


# The word of the pages, and what users say.
_SAID = (
    "actions: ci continuous integration; bits: deterministic; certificate: prove proof paper reviewer; ctrl-c: cancel "
    "zombie interrupt kill; debugger: pdb; faster: slow slower speed speedup utilization utilisation nvidia-smi; "
    "frozen: freeze; gradient: grad; memory: oom; hang: stuck deadlock timeout time-out; learning-rate: lr; "
    "signals: nohup tmux ssh disconnect sighup; sharding: fsdp; undo: remove "
    "unpatch; right: correct; versions: old older upgrade; which: choose select pick"
)
_MEANS = {said: word for word, _, each in (one.partition(": ") for one in _SAID.split("; ")) for said in each.split()}
_UNSAID = "a an and are be can do does for get how i in is it low me my no not of on or several the to too use what why"
_CODE = re.compile(r"(?ms)^```.*?^```\n")
# A first cell of a table, the bold beginning of a paragraph, and a command with its comment are nearly headings.
_ROWS = re.compile(r"(?m)^(?:\| (.+?) \|.*$(?!\n\|-)|(?:- )?\*\*(.+?)\*\*.*|(?:\$ )?([a-z].*? {2,}# .*))")
_ITEM = re.compile("[,;:] |ddpshim ")
_LESS = "from_other_guides", "README", "one_gpu"
_WEIGHTS = {"your_trainer": 1.3, "MIGRATION": 0.9, **dict.fromkeys(_LESS, 0.7), "decisions": 0.3}


def _docs(arguments: argparse.Namespace) -> int:
    known, words = pages(), arguments.words
    if not words:
        print(*known, sep="\n")
    elif (text := _named(known, " ".join(words))) is not None:
        print(text, end="")
    else:
        found = _headings(known, [word.strip("?!.,()\"'") for word in " ".join(words).lower().split()])
        if not found:
            near = nearest(words[0], [*known]) or "."
            say(f"no page matches {' '.join(words)!r}{near} Use other words; `python -m ddpshim docs` lists all pages.")
            return 2
        for page, heading, text in found:
            print(f"{page}: {heading}\n    {text}")
        print(f"\nThe whole page: python -m ddpshim docs {found[0][0]}")
    return 0


def _named(known: dict[str, Path], words: str) -> Optional[str]:
    """Return a page, or a section, that `words` name: run, run.md#exceptions, your-trainer. Local."""
    name, _, anchor = re.sub(r"^[./]*(docs/)?|\.md(?=#|$)", "", words).partition("#")
    page = {page.lower(): page for page in known}.get(re.sub("[ -]", "_", name.lower()))
    if page is None:
        return None
    text = known[page].read_text(encoding="utf-8")
    for _, heading, title, body in _parts(page, text):
        if title == heading and re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") == anchor:
            return f"# {title}\n\n{body}"
    return text


def _headings(known: dict[str, Path], words: list[str]) -> list[tuple[str, str, str]]:
    """Return (page, heading, text) of the three sections that say most of `words`, rare ones above all. Local."""
    said = [_MEANS.get(word, word) for word in words if not word.isdigit() and word not in _UNSAID.split()]
    said += map("-".join, zip(said, said[1:]))  # batch norm: BatchNorm
    # A whole word counts more than one that only begins alike.
    patterns = [_pattern(one) for one in said]
    parts = [part for page, file in known.items() for part in _parts(page, file.read_text(encoding="utf-8"))]
    num_parts = [1 + sum(pattern.search(part[3]) is not None for part in parts) for pattern in patterns]
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for page, heading, title, text in parts:
        points = 0.0
        for pattern, num in zip(patterns, num_parts):
            of_title = pattern.search(title)
            if of_title is not None:
                before, after = title[: of_title.start()], title[of_title.end() :]  # of its item: x in "EMA; a x of b"
                distance = len(_ITEM.split(before)[-1].split()) / 5 + len(_ITEM.split(after)[0].split()) / 20
                points += (4 if of_title[1] is None else 6) / (1 + distance) * math.log(len(parts) / num)
            in_text = (pattern.search(heading) is not None) + min(4, len(pattern.findall(text))) / 4
            points += in_text * math.log(len(parts) / num)
        points *= _WEIGHTS.get(page.rpartition("/")[2], 1)
        if points > best.get((page, heading), (0.0,))[0]:
            best[page, heading] = points, textwrap.shorten(_CODE.sub("", text), 300, placeholder=" ...")
    ranked = sorted(best, key=lambda place: -best[place][0])
    return [(*place, best[place][1]) for place in ranked[:3]]


def _pattern(word: str) -> re.Pattern[str]:
    """Return what finds a word, with an empty group if it is whole; data-parallel finds DataParallel too. Local."""
    whole, start = (re.escape(part).replace(r"\-", "[- ]?") for part in (word, word[:5].rstrip("s-")))
    return re.compile(rf"(?<![a-z])(?:{whole}s?(?![a-z])()|{start})", re.IGNORECASE)


def _parts(page: str, text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (page, heading, title, text) of each section of a page, and of each row in it."""
    parts = re.split(r"(?m)^#+ (.+)\n+", _CODE.sub(lambda code: code[0].replace("\n#", "\n #"), text))
    for heading, body in zip(parts[1::2], parts[2::2]):
        yield page, heading, heading, body
        for row in _ROWS.finditer(body):
            yield page, heading, row[1] or row[2] or row[3], row[0]
