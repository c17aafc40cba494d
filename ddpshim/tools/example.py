"""Writes an example for trying ddpshim: a config for the released robomimic, and its data (`ddpshim example`)."""

from __future__ import annotations

import argparse
import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ddpshim.errors import TargetError

if TYPE_CHECKING:
    from ddpshim.arguments import Commands

CONFIG, DATA = "lift_bc.json", "lift_scripted200_train.hdf5"
_HOMES = ("lift", "../../examples/data")  # in a wheel, and in a checkout


def add(commands: Commands) -> None:
    """Add the command `example` to a parser. Local."""
    text = "write a config of robomimic and its data, to try ddpshim with"
    example = commands.add_parser("example", help=text, description=text)
    example.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="for the two files (here)")
    example.set_defaults(run=_example)


def _example(arguments: argparse.Namespace) -> int:
    print(write(arguments.out))
    return 0


def write(folder: Path) -> str:
    """Write the config and its data into a folder; return text with the commands that train on them. Local.

    Does not import torch. The config has absolute paths, so it can be run from any folder. Raises TargetError, and
    writes nothing, if a config with other contents exists.
    """
    home = next(path for name in _HOMES if (path := Path(__file__).parent / name).is_dir())
    folder = folder.expanduser().resolve()
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
    return "\n".join(
        [
            f"wrote {_from_here(config)}, a config for robomimic, and {DATA}, 200 demonstrations of its task Lift.",
            *([] if find_spec("robomimic") else ["Install robomimic first: python -m ddpshim docs start"]),
            "Train on 2 ranks, then in one process, and compare the two:",
            f"  python -m ddpshim run --nproc 2 {train}",
            f"  python {train} --name plain",
            f"  python -m ddpshim report {one} {ranks} --markdown",  # the page needs plotly
            f"Checkpoints go into {_from_here(folder / 'lift_bc')}.",
        ]
    )


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
