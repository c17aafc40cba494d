"""Runs a trainer that somebody made distributed and reports what its ranks do wrong: `python -m ddpshim audit`.

Ranks only record what they do; the records are analysed after the run.
"""
