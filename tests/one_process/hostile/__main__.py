"""Runs these programs (see runner.py)."""

from tests.one_process.hostile import PROGRAMS
from tests.one_process.runner import main

main(PROGRAMS)
