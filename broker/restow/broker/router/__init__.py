"""A router for engines with an OpenAI API: each prompt to a P and a D, as a handoff of its own.

Needs the extra `router`. It holds no state; a broker is asked for nothing but who holds a prompt.
"""
