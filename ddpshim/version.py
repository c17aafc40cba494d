"""The version of ddpshim, where nothing else has to be imported to read it."""

__version__ = "0.1.0"
