"""Compares unedited public trainers in one process and on two ranks: `python -m evidence.field --help`."""
