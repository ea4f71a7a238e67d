"""Networks and attention masks; floor 2: imports nothing of parade."""
