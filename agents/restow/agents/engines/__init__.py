"""Engines, and stand-ins for engines, whose state an agent can export and import."""
