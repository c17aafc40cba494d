"""Checks trainers without running them: what breaks, or silently trains something else, on several ranks.

Nothing of the code that it reads is imported, and neither is torch.
"""
