"""One order of samples, each rank's share of it, and the loaders and memory that give it."""
