"""A command is a function here; `main` gives it its name."""
