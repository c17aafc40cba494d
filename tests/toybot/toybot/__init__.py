"""A small codebase that trains robots' policies on one device, and knows nothing of ddpshim."""

__version__ = "1.0"
