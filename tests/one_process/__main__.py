"""Runs programs of all files, by names such as `gpus.plain` (see runner.py)."""

from tests.one_process import changing, gpus, graphed, hostile, idioms, in_pieces, layouts
from tests.one_process.runner import Programs, main

PROGRAMS = Programs()
for file in (idioms, hostile, gpus, layouts, changing, in_pieces, graphed):
    PROGRAMS.update({f"{file.__name__.rpartition('.')[2]}.{name}": made for name, made in file.PROGRAMS.items()})

if __name__ == "__main__":
    main(PROGRAMS)
