"""Knows who this process is in its job: launcher, ranks, devices, random streams, failures, signals, records."""
