"""What operators are shown: documents for scripts, and rows of them for people."""
