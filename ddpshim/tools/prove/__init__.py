"""Shows that a trainer is the same experiment on several ranks as in one process: `python -m ddpshim prove`.

The trainer runs in one process, once more with a rounding error added to each gradient, and on the ranks. Processes
write down what goes in and comes out of each step; what differs is found afterwards, from what they wrote.
"""
