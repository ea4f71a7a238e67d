"""Decoding with any-subset models: infilling, and the cache of the two streams."""
