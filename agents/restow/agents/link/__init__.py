"""The stream to the broker: what is said on it, and what happens when it breaks."""
