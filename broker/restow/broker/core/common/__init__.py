"""Vocabulary of the core: keys, events, actions, limits, and plans of a pair."""
