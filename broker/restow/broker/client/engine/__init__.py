"""The sessions in which an engine publishes, demands and hears how its handoffs end."""
