"""Gradients, losses and weights are those of one process."""
