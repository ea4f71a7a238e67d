"""What all commands share: the grammar key=value, recipes, their inputs, tables and pictures."""
