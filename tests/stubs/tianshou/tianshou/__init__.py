"""Stands in for tianshou where it is not installed: robomimic's robocasa branch plays several episodes at once with it.

tianshou 0.4.10, which it asks for, needs numba and gym, and neither knows numpy 2.
"""
