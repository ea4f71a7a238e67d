"""Training noise: which tokens of a row are masked, by method; orders and noise schedules."""
