"""Applies patch sets to files on disk, and to modules in memory."""
