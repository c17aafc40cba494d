"""Knows and changes this process by itself: launcher, devices, machine, messages; no group of ranks."""
