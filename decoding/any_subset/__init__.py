"""Any-subset models in decoding: infilling, and the cache of their two streams."""
