"""Holds the commands that check a trainer (doctor, audit, prove) or a machine (selftest), and smaller commands."""
