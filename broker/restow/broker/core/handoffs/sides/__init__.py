"""What P and D have said of one handoff: P's publication, D's demand, and an offer between them."""
