"""What every run does beside its method: checkpoints, resuming, logs, provenance, guards."""
