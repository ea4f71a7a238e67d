"""Collectors of `decoding.collect`: teacher answers and Jacobi trajectories."""
