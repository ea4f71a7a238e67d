"""What every run needs whatever its method: checkpoints, resuming, logs, provenance, guards."""
