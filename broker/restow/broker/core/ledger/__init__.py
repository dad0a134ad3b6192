"""The ledger: all handoffs, their deadlines, and the single way in which each ends."""
