"""DDP as its users know it: each rank takes its share of one order of samples, and draws its own noise."""
