"""Changes somebody's trainer, whoever wrote it: patches, stand-ins, import hooks, DataParallel scripts."""
