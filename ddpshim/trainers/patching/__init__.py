"""Patch sets: applied to files, and to modules that are loaded."""
