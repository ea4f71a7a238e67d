"""Lightning modules, fit, export and callbacks; floor 4."""
