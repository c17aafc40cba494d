"""One file for each promise of ddpshim: `python bootstrap.py test --fast`. They train `trainer.py`, as users do."""
