"""Replaces dm_control: ACT imports it even for training, which does not use it."""
