"""Which broker owns which pool: a state machine of events, a time and actions. No I/O."""
