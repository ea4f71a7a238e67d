"""Calibration: the ranking of draft trees, the best draft graph, and stored decoding traces."""
