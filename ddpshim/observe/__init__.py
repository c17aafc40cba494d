"""What a run wrote down, where its time went, and the page about it."""
