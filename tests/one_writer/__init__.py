"""Files are written once, whole or not at all."""
