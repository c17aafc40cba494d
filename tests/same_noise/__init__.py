"""Ranks draw what one process would draw, and read its clock."""
