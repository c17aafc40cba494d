"""Distributes trainers that do not use ddpshim: patches, stand-ins, import hooks, DataParallel scripts."""
