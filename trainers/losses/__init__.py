"""Losses as pure functions of tensors: unreduced loss and weight of each position."""
