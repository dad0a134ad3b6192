"""Options that commands share, and their values from a file or the environment."""
