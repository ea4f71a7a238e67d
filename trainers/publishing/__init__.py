"""Exports: their folder, model card and bundled code, their checks, and the push to the Hub."""
