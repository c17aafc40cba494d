"""How well a policy does: episodes dealt to all ranks, each with its seed, and what they say of its success."""
