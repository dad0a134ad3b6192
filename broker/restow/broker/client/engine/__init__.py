"""Sessions, in which an engine publishes, makes demands, and hears how its handoffs end."""
