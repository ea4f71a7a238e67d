"""Shared by all commands: the grammar `key=value`, recipes, their inputs, tables and pictures."""
