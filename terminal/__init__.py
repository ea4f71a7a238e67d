"""What a user sees of work that takes long. Any package may import it; it imports none."""
