"""Starts jobs: `run`, the process of a rank, `spawn`, and sbatch scripts."""
