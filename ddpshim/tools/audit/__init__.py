"""A trainer that was distributed by hand, run on several ranks and looked at from outside: `python -m ddpshim audit`.

Ranks only write down what they do; what it means is found afterwards, from what they wrote.
"""
