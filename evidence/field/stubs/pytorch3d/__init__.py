"""Replaces pytorch3d, whose builds need a certain torch. DP3 imports it, and calls it only to subsample points."""
