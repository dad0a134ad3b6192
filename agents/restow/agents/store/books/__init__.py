"""Bookkeeping of a store's memory: what it keeps, where, and what to evict. No I/O."""
