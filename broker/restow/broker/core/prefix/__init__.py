"""Prefixes: who says that it holds the state of which, and how much of one somebody holds."""
