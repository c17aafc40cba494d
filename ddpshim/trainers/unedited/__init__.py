"""Runs unedited trainers of any kind as ranks: their files, clocks, networks, loaders and evaluations."""
