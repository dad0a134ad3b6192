"""A small router for engines with an OpenAI API: a reference of what P and D must be sent."""
