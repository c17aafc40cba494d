"""Distributes trainers that know nothing of ddpshim: patches, stand-ins, import hooks, DataParallel scripts."""
