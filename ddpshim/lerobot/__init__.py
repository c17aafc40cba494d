"""Distributes LeRobot's trainer, unedited: docs/lerobot.md."""
