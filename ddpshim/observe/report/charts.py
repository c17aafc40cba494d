"""Draws the charts of the report, as SVG that takes its colours from the page.

Text stays text, in the page's own font, and every colour is a variable of its style: one picture serves light and dark.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ddpshim.errors import ReportError
from ddpshim.job.say import count
from ddpshim.observe.report.findings import deviations, largest_gap
from ddpshim.observe.report.run import OWN_WORK, PARTS, Epoch, Run
from ddpshim.observe.report.words import percent

# Colours that nothing else has, and the variables that stand for them in the page.
_INK, _FAINT = "#010101", "#020202"
_RANKS = [f"#0301{n:02x}" for n in range(8)]
_PARTS = [f"#0401{n:02x}" for n in range(len(PARTS))]
_GOOD, _BAD = "#050101", "#050102"
_VARIABLES = {
    **{_INK: "ink", _FAINT: "faint", _GOOD: "good", _BAD: "bad"},
    **{colour: f"rank{n}" for n, colour in enumerate(_RANKS)},
    **{colour: f"part{n}" for n, colour in enumerate(_PARTS)},
}
_DASHES: list[Any] = ["-", (0, (5, 2)), (0, (2, 2)), (0, (6, 2, 1, 2))]
_WIDTH, _HEIGHT = 5.2, 3.1  # inches
_MOST_NAMED = 8
_FEW_EPOCHS = 3  # of which the losses inside are drawn
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.edgecolor": _FAINT,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "legend.frameon": False,
    "legend.fontsize": 9,
}


class Chart(NamedTuple):
    """A picture, and what it says to those who cannot see it. `table` names the one with its numbers."""

    title: str
    says: str
    how_to_read: str
    table: str
    svg: str


def charts(run: Run) -> list[Chart]:
    """All charts that the run has numbers for.

    Raises ReportError where matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError(
            f"matplotlib cannot be imported ({error}); the page would have no charts. Install it with "
            "`pip install ddpshim[report]` (or `pip install matplotlib`), or use --markdown."
        ) from error
    drawn = []
    for draw in (_losses, _deviations, _times, _balance, _memory, _timeline):
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fonts that lack a sign: the page's font draws the text
            figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
            made = draw(run, figure)
            if made is not None:
                drawn.append(Chart(*made, _svg(figure, draw.__name__)))
    return drawn


_Made = Optional[tuple[str, str, str, str]]


def _losses(run: Run, figure: Any) -> _Made:
    epochs = [epoch for epoch in run.epochs if epoch.mean is not None]
    if not epochs:
        return None
    axes = figure.subplots()
    x = [epoch.number for epoch in epochs]
    means = [epoch.mean for epoch in epochs]
    has_curves = len(epochs) <= _FEW_EPOCHS and any(r.record.get("curve") for e in epochs for r in e.training.values())
    wide: Any = [*zip(x, means)]
    if has_curves:
        wide = [edge for number, mean in wide for edge in ((number - 1, mean), (number, mean), (number, None))]
    style: Any = {"linewidth": 6, "alpha": 0.16, "solid_capstyle": "butt"}
    axes.plot(*zip(*wide), color=_INK, label="mean of the ranks", **style)
    for rank, colour, dash in _styled(run.ranks):
        rows = [(epoch.number, epoch.training[rank]) for epoch in epochs if rank in epoch.training]
        if has_curves:
            curves = [(number, row.record.get("curve", [])) for number, row in rows]
            at = [number - 1 + (i + 0.5) / len(curve) for number, curve in curves for i in range(len(curve))]
            own = [loss for _, curve in curves for loss in curve]
            axes.plot(at, own, color=colour, linestyle=dash, linewidth=1.2, label=f"rank {rank}")
        else:
            losses = {number: row.loss for number, row in rows}
            _line(axes, epochs, losses, color=colour, linestyle=dash, label=f"rank {rank}")
    valid = {epoch.number: epoch.valid for epoch in epochs if epoch.valid is not None}
    if valid:
        marker = {"marker": "D", "markersize": 3.5, "markerfacecolor": "none"}
        _line(axes, epochs, valid, color=_INK, linewidth=1, linestyle=(0, (1, 2)), label="validation", **marker)
    shown = [value for value in (*means, *valid.values()) if value is not None and math.isfinite(value)]
    if shown and min(shown) > 0 and max(shown) > 20 * min(shown):
        axes.set_yscale("log")
    _label_epochs(axes, xlabel="epochs" if has_curves else "epoch", ylabel="loss")
    says = f"Mean training loss {means[0]:.4g} in epoch {x[0]}"
    if len(x) > 1:
        says = f"Training loss from {means[0]:.4g} in epoch {x[0]} to {means[-1]:.4g} in epoch {x[-1]}"
    says += f", validation loss {[*valid.values()][-1]:.4g} at the end." if valid else "."
    inside = "inside the epochs, " if has_curves else ""
    how = f"A line for each rank, {inside}over the wide line of their mean: where they cover each other, ranks agree."
    return "Loss", says, how, "loss"


def _deviations(run: Run, figure: Any) -> _Made:
    gap = largest_gap(run)
    if gap is None:
        return None
    axes = figure.subplots()
    by_epoch = [{rank: 100 * (loss / centre - 1) for rank, loss, centre in deviations(e) if centre} for e in run.epochs]
    axes.axhline(0, color=_INK, linewidth=6, alpha=0.16)
    for rank, colour, dash in _styled(run.ranks):
        own = {epoch.number: of_ranks.get(rank) for epoch, of_ranks in zip(run.epochs, by_epoch)}
        _line(axes, run.epochs, own, color=colour, linestyle=dash, label=f"rank {rank}")
    epoch, rank, share = gap
    offset = by_epoch[run.epochs.index(epoch)][rank]
    axes.plot([epoch.number], [offset], "o", markersize=9, markerfacecolor="none", markeredgecolor=_BAD)
    axes.margins(y=0.15)
    _label_epochs(axes, ylabel="own loss against the mean, %")
    says = f"Rank {rank} is farthest from the mean, by {percent(share)} in epoch {epoch.number} (circled)."
    how = (
        "Each rank sees other samples, so lines move around zero. One that stays away from it has other data or "
        "another model; lines that are all exactly zero mean the same samples on every rank."
    )
    return "Difference between the ranks", says, how, "loss"


def _times(run: Run, figure: Any) -> _Made:
    ranks = [rank for rank in run.ranks if run.trained_s(rank)]
    if not ranks:
        return None
    figure.set_size_inches(_WIDTH, min(6.0, max(_HEIGHT * 0.75, 1.2 + 0.34 * len(ranks))))
    axes = figure.subplots()
    left = [0.0] * len(ranks)
    shares = {name: [run.share(rank, [part]) for rank in ranks] for part, name in PARTS.items()}
    for (name, of_ranks), colour in zip(shares.items(), _PARTS):
        widths = [100 * share for share in of_ranks]
        axes.barh(range(len(ranks)), widths, left=left, height=0.7, color=colour, label=name)
        for row, (width, start) in enumerate(zip(widths, left)):
            if width >= 8 and len(ranks) <= 16:
                axes.text(start + width / 2, row, f"{width:.0f}%", ha="center", va="center", fontsize=8.5)
        left = [a + b for a, b in zip(left, widths)]
    every = math.ceil(len(ranks) / 16)
    axes.set_yticks(range(0, len(ranks), every), [f"rank {rank}" for rank in ranks[::every]])
    axes.set(xlabel="share of the time in training epochs, %", xlim=(0, 100), ylim=(len(ranks) - 0.5, -0.5))
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside upper center", ncols=5, handlelength=1, columnspacing=1, handletextpad=0.4)
    says = ", ".join(f"{name} {percent(sum(of) / len(of))}" for name, of in shares.items() if max(of) > 0.0005)
    how = (
        "Data wait: the next batch was not there yet. Communication: what of it was not hidden behind compute, waiting "
        "for slower ranks included. Compute holds forward and backward passes and all else between two batches."
    )
    return "Where the time went", f"Mean over the ranks: {says}.", how, "time"


def _balance(run: Run, figure: Any) -> _Made:
    lines: dict[int, dict[int, float]] = {}
    for epoch in run.epochs:
        for rank, row in epoch.training.items():
            if row.steps:
                lines.setdefault(rank, {})[epoch.number] = 1000 * row.seconds(OWN_WORK) / row.steps
    works = {rank: 1000 * work for rank, work in run.own_work().items()}
    if len(works) < 2:
        return None
    axes = figure.subplots()
    for rank, colour, dash in _styled(sorted(lines)):
        _line(axes, run.epochs, lines[rank], color=colour, linestyle=dash, label=f"rank {rank}")
    most = 1.12 * max(value for line in lines.values() for value in line.values())
    _label_epochs(axes, ylabel="own work, ms a step", ylim=(0, most or 1))
    slow, fast = max(works, key=lambda r: works[r]), min(works, key=lambda r: works[r])
    says = f"Slowest is rank {slow} with {works[slow]:.2f} ms a step, fastest rank {fast} with {works[fast]:.2f}."
    how = (
        "A step takes as long as its slowest rank. Lines should lie on each other; a rank above the others holds all "
        "of them up, and they wait for it in communication."
    )
    return "Balance of the ranks", says, how, "time"


def _memory(run: Run, figure: Any) -> _Made:
    names = {"rss": "", "gpu_allocated": ", GPU", "gpu_reserved": ", GPU reserved"}
    dashes = {"rss": "-", "gpu_allocated": (0, (4, 2)), "gpu_reserved": (0, (1, 2))}
    held: dict[tuple[int, str], dict[int, float]] = {}
    for epoch in run.epochs:
        for rank, row in epoch.training.items():
            for key in names:
                if row.memory.get(key) is not None:
                    held.setdefault((rank, key), {})[epoch.number] = row.memory[key]
    if not held:
        return None
    most = max(value for line in held.values() for value in line.values())
    unit, scale = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    axes = figure.subplots()
    for rank, colour, _ in _styled(run.ranks):
        for key, name in names.items():
            if (rank, key) in held:
                scaled = {number: value / scale for number, value in held[rank, key].items()}
                _line(axes, run.epochs, scaled, color=colour, linestyle=dashes[key], label=f"rank {rank}{name}")
    _label_epochs(axes, ylabel=f"memory, {unit}", ylim=(0, 1.15 * most / scale))
    at_end = [line[max(line)] for (_, key), line in held.items() if key == "rss"]
    says = f"At the end processes hold {min(at_end) / scale:.1f} to {max(at_end) / scale:.1f} {unit}." if at_end else ""
    how = (
        "What each rank's process holds at the end of an epoch, without its data workers, and the most that torch has "
        "held on its GPU. A line that keeps rising is a leak."
    )
    return "Memory", says, how, "memory"


def _timeline(run: Run, figure: Any) -> _Made:
    offset, spans = 0.0, {}
    for start in run.starts:
        spans[start.number] = (offset, start.began)
        offset += start.ended - start.began

    def place(number: int, moment: float) -> float:
        before, began = spans[number]
        return before + moment - began

    unit, scale = ("s", 1.0) if offset < 180 else ("minutes", 60.0) if offset < 3 * 3600 else ("hours", 3600.0)
    bars: dict[str, list[tuple[float, float]]] = {"training": [], "validation": [], "rollouts": []}
    for start, rank, record in (*run.events("epoch"), *run.events("rollout")):
        if rank == min(start.ranks):
            row, seconds = "rollouts", record.get("seconds", 0.0)
            if record["kind"] == "epoch":
                row = "validation" if record.get("phase") == "validation" else "training"
                seconds = math.fsum(record.get("seconds", {}).values())
            bars[row].append((place(start.number, record["time"]) - float(seconds), float(seconds)))
    guards, saves = list(run.events("guard")), list(run.events("checkpoint"))
    rows = [name for name, there in {**bars, "guards": guards, "checkpoints": saves}.items() if there]
    if not rows:
        return None
    axes = figure.subplots()
    for name, colour in zip(bars, (_PARTS[1], _PARTS[2], _PARTS[3])):
        if bars[name]:
            edges = [(x / scale, max(wall, 0.001 * offset) / scale) for x, wall in bars[name]]
            axes.broken_barh(edges, (rows.index(name) - 0.3, 0.6), facecolor=colour, edgecolor="none")
    for passed, colour, marker in ((True, _GOOD, "|"), (False, _BAD, "X")):
        at = [place(s.number, r["time"]) / scale for s, _, r in guards if bool(r.get("passed")) is passed]
        if at:
            axes.plot(at, [rows.index("guards")] * len(at), marker, color=colour, markersize=11, markeredgewidth=1.5)
    if saves:
        at = [place(s.number, r["time"]) / scale for s, _, r in saves]
        axes.plot(at, [rows.index("checkpoints")] * len(at), "v", color=_INK, markersize=7)
    for start in run.starts[1:]:
        axes.axvline(spans[start.number][0] / scale, color=_BAD, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), rows)
    until = max(offset, 1e-3) / scale * 1.01
    axes.set(xlabel=f"time while it ran, {unit}", ylim=(len(rows) - 0.5, -0.5), xlim=(0, until))
    axes.grid(visible=False, axis="y")
    num_failed = sum(not r.get("passed") for _, _, r in guards)
    says = (
        f"{count(len(run.starts), 'start')}, {count(len(bars['training']), 'training epoch')}, "
        f"{count(len(guards), 'guard result')} of which {num_failed} failed, {count(len(saves), 'checkpoint')}."
    )
    how = (
        "What the first rank did, one after the other; a tick is a comparison of the guards, a cross one that failed, "
        "a triangle a checkpoint. A broken line is where the run was started again; what lies between is left out."
    )
    return "Timeline", says, how, "starts"


def _styled(ranks: Sequence[int]) -> Iterator[tuple[int, str, Any]]:
    """Each rank with its colour and dashes, which differ for the first 32."""
    for number, rank in enumerate(ranks):
        yield rank, _RANKS[number % len(_RANKS)], _DASHES[(number + number // len(_RANKS)) % len(_DASHES)]


def _line(axes: Any, epochs: Sequence[Epoch], by_epoch: Mapping[int, Optional[float]], **style: Any) -> None:
    x = [epoch.number for epoch in epochs]
    values = [math.nan if (value := by_epoch.get(number)) is None else value for number in x]
    if sum(map(math.isfinite, values)) <= 12:
        style.setdefault("marker", "o")
        style.setdefault("markersize", 3.5)
    axes.plot(x, values, **{"linewidth": 1.6, **style})


def _label_epochs(axes: Any, **labels: Any) -> None:
    """Names both axes, of which x are epochs, and the lines."""
    from matplotlib.ticker import MaxNLocator

    axes.set(**{"xlabel": "epoch", **labels})
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim(round(low) - 0.5, round(high) + 0.5)
    handles, names = axes.get_legend_handles_labels()
    if len(handles) > 1:
        if len(handles) > _MOST_NAMED:
            handles = [*handles[: _MOST_NAMED - 1], handles[-1]]
            names = [*names[: _MOST_NAMED - 1], f"... {names[-1]}"]
        ncols = 2 if max(map(len, names)) > 16 else len(handles) if len(handles) <= 5 else 4
        shape = {"handlelength": 1.6, "columnspacing": 0.9, "handletextpad": 0.6}
        axes.figure.legend(handles, names, loc="outside upper center", ncols=ncols, **shape)


def _svg(figure: Any, name: str) -> str:
    """The figure as an element of HTML, without what the page has or must not have: prologue, metadata, a font."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # ids that differ between the charts of a page
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    ids = set(re.findall(r'\bid="([^"]+)"', text))
    named = r'(id="|href="#|url\(#)([^")]+)(?=["\)])'
    return re.sub(named, lambda match: f"{match[1]}{name}-{match[2]}" if match[2] in ids else match[0], text)
