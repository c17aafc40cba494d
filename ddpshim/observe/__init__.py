"""Records what a run does, measures where its time goes, and builds the page about it."""
