"""Reads a trainer's code, and finds what hangs or silently trains something else on several ranks: `check --read`.

Imports neither torch nor any of the code that it reads.
"""
