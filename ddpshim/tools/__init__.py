"""Holds the commands that check a trainer (check) or a machine (selftest), and smaller commands."""
