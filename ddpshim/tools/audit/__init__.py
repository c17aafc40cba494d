"""Runs a trainer that has its own distributed code and reports what ranks do wrong: `python -m ddpshim audit`.

Ranks only record what they do; the records are analysed after the run.
"""
