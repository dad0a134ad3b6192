"""What the broker knows of each handoff, from its first word to its end."""
