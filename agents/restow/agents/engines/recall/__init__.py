"""A small hybrid model that recalls what its prompt says, so that corrupted state shows."""
