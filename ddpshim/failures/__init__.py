"""Finds and names what ends a job: errors, hangs, signals, ranks that cannot meet or that train separate models."""
