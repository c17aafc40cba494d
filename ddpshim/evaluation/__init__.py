"""Evaluates policies: episodes dealt to all ranks, each with its seed, and the success rate with an interval."""
