"""Everything that a run of any method needs: checkpoints, resuming, logs, provenance, guards."""
