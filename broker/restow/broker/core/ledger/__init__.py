"""The ledger has every handoff, and the one way in which each ends and is counted."""
