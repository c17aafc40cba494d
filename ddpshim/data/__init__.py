"""Gives each rank its share of one order of samples: samplers, loaders, and memory that ranks share."""
