"""Defines this process's place in its job: launcher, ranks, devices, random streams, failures, signals, records."""
