"""This room holds what any engine's adapter needs."""
