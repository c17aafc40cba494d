"""Knows and changes this process by itself: launcher, store, devices, machine, messages; no group of ranks."""
