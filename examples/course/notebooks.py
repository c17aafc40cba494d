"""Creates the notebooks of the course and of the quick start from their scripts, and runs one without Jupyter.

    python examples/course/notebooks.py                               # writes 1_setup.ipynb and the others
    python examples/course/notebooks.py examples/course/1_setup.py    # runs its cells one after another

Edit the scripts: git does not keep the notebooks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CELL = re.compile(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", re.MULTILINE)


def notebook(script: str) -> str:
    """Return the text of a notebook (nbformat 4.5, without outputs) for a script whose cells begin with `# %%`."""
    cells: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(CELL.findall(script)):
        is_markdown = kind.strip() == "[markdown]"
        text = re.sub(r"^# ?", "", text, flags=re.MULTILINE) if is_markdown else text
        cell: dict[str, Any] = {"cell_type": "markdown" if is_markdown else "code", "id": f"cell-{number}"}
        cell.update({"metadata": {}, "source": text.strip("\n").splitlines(keepends=True)})
        cells.append(cell if is_markdown else {**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def scripts() -> list[Path]:
    """Return the scripts of the quick start and of the chapters."""
    return [FOLDER.parent / "quick_start.py", *sorted(FOLDER.glob("[0-9]_*.py"))]


def run(script: Path) -> None:
    """Execute the code cells of the script's notebook in one namespace, as a kernel does."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(notebook(script.read_text()))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{script.name}, {cell['id']}", "exec"), names)


def write() -> None:
    """Write the notebook of each script beside it."""
    for script in scripts():
        script.with_suffix(".ipynb").write_text(notebook(script.read_text()))


def main() -> None:
    named = [Path(argument) for argument in sys.argv[1:] if argument.endswith(".py")]
    for script in named:
        run(script)
    if not named:
        write()


if __name__ == "__main__":
    main()
