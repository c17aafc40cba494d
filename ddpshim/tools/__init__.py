"""Holds the commands that check a trainer (doctor, check) or a machine (selftest), and smaller commands."""
