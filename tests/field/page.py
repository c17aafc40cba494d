"""The page about the field's trainers, of what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.field.__main__ import Row

HEAD = """# Public trainers, unedited

Each trainer is as its authors published it, not one character edited. It trained as `python TYPED`, without ddpshim,
and as `python -m ddpshim run --nproc 2 TYPED`, two processes on a CPU. Same seed, noise and dropout on, tiny
data, and tiny networks by the options in the line. Then all that the runs left behind was compared: weights and states
of every optimizer on each rank, checkpoints with their averaged weights (EMA), the numbers in the logs row by row, and
the names of all files, times left out.

In brackets: how far `python TYPED` is from itself where the CPU's other instructions round otherwise. "Equal" is within
1e-5, or within ten times that, and no file in excess or missing.

`python -m tests.field --upstream DIR --write docs/trainers.md` makes this page.
[patches/README.md](../patches/README.md) says what DIR is; requirements/trainers.txt is what the trainers need.
Installed from nothing (Python 3.11) that is half a minute of CPU.

| trainer | batches split | result | weights | EMA | optimizer | logged numbers |
|---|---|---|---|---|---|---|
"""


def written(rows: list[Row]) -> str:
    """The page, with a table of these rows."""
    lines = []
    for row in rows:
        found = row.differences
        shown = [_shown(row, key) for key in ("weights", "EMA", "optimizer", "losses")]
        results = {"equal": "equal", "refused": "refused, below", "left alone": "left alone; its ranks end equal"}
        result = results.get(row.verdict, f"**{row.verdict}**, below")
        split = "yes" if row.is_split else "no: whole on each rank"
        lines.append(f"| {row.trainer.name} | {split if found else ''} | {result} | {' | '.join(shown)} |")
    page = [
        HEAD + "\n".join(lines),
        "A number is the largest difference from one process; a logged number's is relative above 1.",
    ]
    page.append("## What was typed\n")
    for row in rows:
        owner, commit = row.trainer.source
        place = "" if row.trainer.folder == "." else f", in `{row.trainer.folder}/`"
        stubs = f" Stand-ins: {', '.join(row.trainer.stubs)}." if row.trainer.stubs else ""
        page.append(f"**{row.trainer.name}**: {owner} at {commit[:12]}{place}.{stubs}")
        page.append("```\n" + _wrapped(["TYPED =", *map(_quoted, row.trainer.command)]) + "\n```")
        page += [f"- {note}" for note in row.notes if note]
    page.append(TAIL)
    return "\n\n".join(part.rstrip("\n") for part in page) + "\n"


TAIL = """## What differs, and why

- vae: the network is equal, and so are the losses of epochs, which it adds up of sums over the samples of a batch. In
  between it prints such a sum divided by the length of the batch, and multiplies by that to count samples: on a rank
  this is the length of a share, so that it prints twice the loss and half the count. A line says so, with the length.
- libero: as published, it changes the colours of images by numbers that are drawn in a loop over the samples, of which
  a rank has fewer: other numbers than those of one process. A line says so, and what was typed leaves it out
  (`color_aug`). What was logged is equal, and so are the weights; running statistics of BatchNorm in one of the two
  encoders are 8e-04 apart, 13 times what rounding amounts to. Why is not known.
- umi distributes itself (accelerate), and is left alone: its batch size is that of a rank, its ranks draw equal noise.

act and gnm draw random numbers for a sample, in a data worker. So each rank loads whole batches, and a line says that.
gnm is not in the table, as it takes minutes. It is within what rounding amounts to, which is much: weights 1e-02
(2e-02), logged numbers 1e-01 (1e-01). Its loss adds a mean over what a mask leaves to a mean over all samples; ranks
have shares that count otherwise in each, and the gradient of each is scaled by itself (tests/test_unedited.py compares
such losses in float64). Before the first step its logged numbers are those of one process to 1e-06, but for the total
of the two means: that is the mean over the ranks, 5.4 for 4.8, and a line says so.

## Stand-ins

What cannot be had on a machine without a GPU, a network or a display has a stand-in beside the trainer, never in it
(tests/field/stubs, put on PYTHONPATH for both runs):

- simulator: an `env_runner` (LIBERO: environments) that plays the policy for a few steps on random observations, and
  scores what it did
- transformers: BERT's embedding of LIBERO's sentences, whose weights are on a hub, is computed from their letters
- numpy's name `bool`, which robomimic 0.2.0 uses, and `torch.load` as before torch 2.6 (a variable): LIBERO pins both
- CUDA: ACT calls `.cuda()` on all that it makes, which here leaves it on the CPU
- ResNet's weights: a file of random ones, where torch would download them to
- dm_control, IPython, pytorch3d: imported by ACT and DP3, and not used while they train as here
- wandb: visualnav-transformer asks for the network, and DP3 logs nowhere else; the stand-in writes what is logged to a
  file of JSON lines. diffusion_policy has W&B itself, in its mode `disabled`
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
