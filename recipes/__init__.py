"""Recipes: YAML files, and the code that composes, checks and builds them; typed options."""
