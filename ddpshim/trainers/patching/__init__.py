"""Applies patch sets to files, and to modules that are loaded."""
