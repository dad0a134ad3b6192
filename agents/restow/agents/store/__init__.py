"""The store: an engine that never computes. It keeps states and gives them back."""
