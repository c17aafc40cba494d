"""A static checker for trainers: what breaks, or silently trains something else, on several ranks.

Nothing of the code that it reads is imported, and neither is torch.
"""
