"""What happens to a network: wrapped, its gradients reduced, its weights and random streams compared."""
