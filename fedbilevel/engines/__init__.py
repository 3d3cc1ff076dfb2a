"""What runs an algorithm's steps: simulated clients in one process, or deployed ones behind a transport."""
