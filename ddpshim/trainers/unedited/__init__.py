"""Distributes a program for one process that nobody edited, while it runs as a rank."""
