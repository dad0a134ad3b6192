"""This broker as one of several, or alone: which pools it owns, and whether it may act now."""
