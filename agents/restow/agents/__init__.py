"""Agents that sit beside the engines and move their state."""
