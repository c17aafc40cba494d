"""Stands in for pytorch3d, which is built for one torch. DP3 imports it, and calls it only to subsample points."""
