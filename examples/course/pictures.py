"""Shows the pictures of the course in a notebook; in a script called with --pictures, writes them to pictures/."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any, Callable

FOLDER = Path(__file__).parent / "pictures"
RANK_COLOURS = ["#2b6cb0", "#dd6b20", "#2f855a", "#805ad5"]
GREY = "#718096"


def draw(name: str, paint: Callable[[Any], None], width: float = 8.0, height: float = 3.0) -> None:
    """Call `paint(figure)` with a matplotlib figure of this size in inches, if pictures are wanted."""
    in_notebook = "ipykernel" in sys.modules
    if not in_notebook and "--pictures" not in sys.argv:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    paint(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    if in_notebook:
        from IPython.display import Image, display

        display(Image(drawn.getvalue()))
    else:
        from PIL import Image

        FOLDER.mkdir(exist_ok=True)
        # With a palette the file has a third of the bytes; it is kept in the repository.
        Image.open(drawn).convert("RGB").quantize(128).save(FOLDER / f"{name}.png", optimize=True)
        print(f"picture: {FOLDER / name}.png")
