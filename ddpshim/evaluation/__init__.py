"""Evaluates policies: distributes seeded episodes over all ranks, and gives the success rate with an interval."""
