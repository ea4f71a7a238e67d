"""Training rows: packing, collections, and their order as a function of the seed."""
