"""The state of each handoff, from the first message about it to its end."""
