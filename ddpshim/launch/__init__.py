"""Starts jobs: `run`, the process of a rank, and sbatch scripts."""
