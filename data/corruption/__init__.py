"""What training hides of a row: draft blocks, noised blocks, subsets; orders and schedules."""
