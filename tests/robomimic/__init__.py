"""robomimic, DROID and their forks: patch sets, data, rollouts."""
