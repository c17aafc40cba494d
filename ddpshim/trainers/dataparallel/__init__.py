"""DataParallel scripts that are converted while they run."""
