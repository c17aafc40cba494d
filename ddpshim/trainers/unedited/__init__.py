"""Distributes an unedited program for one process while it runs as a rank."""
