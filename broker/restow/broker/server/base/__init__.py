"""What all of the server stands on: its hub, settings, plans, orders and logs."""
