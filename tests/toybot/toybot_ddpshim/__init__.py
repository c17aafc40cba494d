"""What ddpshim has to know of toybot: an adapter and a patch set."""
