"""Tests whether this machine can train on several ranks."""
