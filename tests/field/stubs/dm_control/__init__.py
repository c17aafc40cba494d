"""Stands in for dm_control: ACT imports its simulation for training, too, and makes none."""
