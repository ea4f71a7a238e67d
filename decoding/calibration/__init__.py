"""What a calibration measures: how trees are ranked, which draft graph is best, traces on disk."""
