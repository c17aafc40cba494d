"""Replaces tianshou if it is not installed: robomimic's robocasa branch plays several episodes at once with it.

robocasa requires tianshou 0.4.10, which needs numba and gym; neither supports numpy 2.
"""
