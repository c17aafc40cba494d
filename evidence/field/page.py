"""Builds the page about public trainers from the measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evidence.field.__main__ import Row

ROOT = Path(__file__).parent.parent.parent
HEAD = """# Public trainers, unedited

This page shows which public trainers give the same result under ddpshim. Every trainer is unedited. It was trained with
`python TYPED`, without ddpshim, and with `python -m ddpshim run --nproc N TYPED`, in N processes on a CPU: the same
seed, noise and dropout on, small data, and small networks through options. Then the results were compared: weights and
states of every optimizer on each rank, checkpoints with averaged weights (EMA), the numbers in the logs row by row, and
the names of all files, without times.

The number in brackets is the rounding error: the larger difference from `python TYPED` of two more runs in one process,
one that uses other CPU instructions and one whose first weights differ in the last bit. "Equal" means within 1e-5, or
within ten times the rounding error, with the same files. "On rows" is the share of the operations on batches that were
divided among the ranks, with `DDPSHIM_ROWS=all`: without it `run` computes calls as small as these whole.

`python -m evidence.field --upstream DIR --nproc 2,3 --write evidence/trainers.md` writes this page.
[patches/README.md](../patches/README.md) says what DIR is. requirements/trainers.txt lists what the trainers need;
installing it (Python 3.11) takes half a minute of CPU.

| trainer | ranks | on rows | result | weights | EMA | optimizer | logged numbers | seconds |
|---|---|---|---|---|---|---|---|---|
"""


def written(rows: list[Row]) -> str:
    """Return the page, with a table of these rows."""
    lines = []
    for row in rows:
        found = row.differences
        shown = [_shown(row, key) for key in ("weights", "EMA", "optimizer", "losses")]
        results = {"equal": "equal", "refused": "refused, below"}
        result = results.get(row.verdict, f"**{row.verdict}**, below")
        shown.append(f"{row.seconds[1]:.0f} ({row.seconds[0]:.0f})" if found else "")
        cells = [row.trainer.name, str(row.num_ranks), f"{row.on_rows}%" if row.on_rows else "", result, *shown]
        lines.append(f"| {' | '.join(cells)} |")
    page = [
        HEAD + "\n".join(lines),
        "A number is the largest difference from one process; for logged numbers above 1 it is relative.",
    ]
    page.append("## Commands\n")
    for trainer in {row.trainer.name: row.trainer for row in rows}.values():
        owner, commit = trainer.source
        place = "" if trainer.folder == "." else f", in `{trainer.folder}/`"
        stubs = f" Stand-ins: {', '.join(trainer.stubs)}." if trainer.stubs else ""
        page.append(f"**{trainer.name}**: {owner} at {commit[:12]}{place}.{stubs}")
        command = [part.replace(f"{ROOT}/", "") for part in trainer.command]
        page.append("```\n" + _wrapped(["TYPED =", *map(_quoted, command)]) + "\n```")
        notes = [(row.num_ranks, note) for row in rows if row.trainer.name == trainer.name for note in row.notes]
        page += [f"- {num_ranks} ranks: {note}" for num_ranks, note in notes if note]
    page.append(TAIL)
    return "\n\n".join(part.rstrip("\n") for part in page) + "\n"


TAIL = """## What differs, and why

- mnist: rounding that Adadelta enlarges, on 2 ranks here, on 3 on another machine. In float64
  (`FIELD_FLOAT64=1 python -m evidence.field`) weights and logged numbers equal one process to 1e-15.
- umi uses accelerate. accelerate is shown one process on each rank, so the batch size is the global one, and the run
  equals `python train.py`. Under `accelerate launch` each rank would load whole batches and draw the same noise.
- act_plus_plus trains without its encoder (`--no_encoder`), because with it the published commit ends with an error.

## Stand-ins

The test machine has no GPU, network or display. What needs one is replaced by modules on PYTHONPATH, for both runs
(evidence/field/stubs); the trainers' files are not changed:

- simulator: an `env_runner` (LIBERO: environments) that plays the policy for a few steps on random observations and
  scores its actions; d3il's and the kitchen's likewise
- transformers: the BERT embedding of LIBERO's sentences is computed from their letters, because its weights are online
- names that numpy, Python and torch no longer have (`numpy.bool`, `collections.Mapping`, `torch._utils._accumulate`),
  and `torch.load` as before torch 2.6 (a variable): some trainers pin older versions
- CUDA: the device "cuda" is the CPU, because some trainers know no other. dt_atari is shown one GPU, whose device is
  the CPU, so that it uses `nn.DataParallel`
- gym: environments whose next state is a simple function of the state and the action; d4rl's data comes from them
- Atari: random images, in the simulator and in the replays, which are read with TensorFlow
- renderer: diffuser's writes the observations that it is to draw, so that samples are compared
- tensorboard: each scalar becomes a line of JSON
- seed: the generators get a seed after the imports, because the trainer sets none
- ResNet's weights: a file of random weights in the place of the download
- dm_control, IPython, pytorch3d: imported by ACT and DP3, but not used in these runs
- wandb: needs its network, and some trainers log nowhere else, so the stand-in writes logged values to a file of JSON
  lines. diffusion_policy uses the real W&B in its mode `disabled`
"""


def _shown(row: Row, key: str) -> str:
    value, rounding = (found.get(key) for found in (row.differences, row.rounding))
    return "" if value is None else f"{_short(value)} ({_short(rounding or 0.0)})"


def _short(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _quoted(word: str) -> str:
    return f"'{word}'" if set(word) & set("[]{} <>") else word


def _wrapped(words: list[str]) -> str:
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > 116:
            lines.append("   ")
        lines[-1] += word if not lines[-1] else " " + word
    return "\n".join(lines)
