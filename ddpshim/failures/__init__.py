"""Finds and names what ends a job: errors, hangs, signals, ranks that train separate models."""
