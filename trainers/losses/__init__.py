"""Losses as pure functions: tensors in, unreduced per-position loss and weights out."""
