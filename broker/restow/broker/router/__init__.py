"""A router for engines with an OpenAI API: each prompt to a P and a D, as a handoff of its own.

Needs the extra `router`. Knows HTTP alone: it asks no broker and holds no state.
"""
