"""What any engine's adapter needs."""
