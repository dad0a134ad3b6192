"""Which engine announced that it holds which prefixes, and how much of a chain it holds."""
