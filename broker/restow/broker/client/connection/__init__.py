"""The connection to a broker: its channel and credentials, and why calls fail."""
