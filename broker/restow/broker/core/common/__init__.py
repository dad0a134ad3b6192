"""What all of the core is written in: events, actions, plans of a pair, bounds."""
