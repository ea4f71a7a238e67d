"""Samplers, verification, caches and their commands; floor 3."""
