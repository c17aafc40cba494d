"""Distributes openpi's PyTorch trainer, unedited: docs/openpi.md."""
