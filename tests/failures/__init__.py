"""Failures end the job, and name the first rank and its line."""
