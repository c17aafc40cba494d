"""Whether this machine can train on several ranks."""
