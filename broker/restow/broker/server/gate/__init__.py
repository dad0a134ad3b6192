"""The gate of a broker: which calls are let in, and how fast."""
