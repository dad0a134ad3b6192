"""Who is let in to a broker, and how fast."""
