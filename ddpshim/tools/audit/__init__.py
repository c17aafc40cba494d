"""Runs a trainer that was distributed by hand on several ranks and judges it: `python -m ddpshim audit`.

Ranks only write down what they do; what it means is found afterwards, from what they wrote.
"""
