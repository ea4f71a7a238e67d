"""Calibration: the ranking of draft trees, the best draft graph, decoding traces on disk."""
