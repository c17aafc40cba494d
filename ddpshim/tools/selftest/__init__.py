"""Tests this machine: `python -m ddpshim selftest`."""
