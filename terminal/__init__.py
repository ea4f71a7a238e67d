"""Terminal: it shows the progress of long work. Any package may import it; it imports none."""
