"""Training rows: packed documents, trajectories and prompts, and the order of the samples."""
