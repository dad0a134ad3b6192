"""The base of the server: its hub, settings, planning, orders and logs."""
