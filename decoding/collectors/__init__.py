"""What `decoding.collect` collects: teacher answers and Jacobi trajectories."""
