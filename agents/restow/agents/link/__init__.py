"""An agent's stream to the broker, and the orders that arrive on it."""
