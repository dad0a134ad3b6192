"""The connection to a broker: its channel and credentials, and why a call over it failed."""
