"""Wraps a network, reduces its gradients, and checks that ranks train one model."""
