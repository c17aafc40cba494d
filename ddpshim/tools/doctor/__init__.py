"""Checks trainers without running them: finds what fails, or silently trains something else, on several ranks.

Imports neither torch nor any of the code that it reads.
"""
