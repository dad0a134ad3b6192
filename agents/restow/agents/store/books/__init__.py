"""What a store's memory keeps, where it lies and what it is worth: bookkeeping that does no I/O."""
