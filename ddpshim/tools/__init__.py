"""Holds the commands that look at a trainer or a machine: doctor, audit, selftest."""
