"""Options that commands share, and what they are where nobody says: a file, the environment."""
