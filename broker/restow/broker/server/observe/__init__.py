"""What a broker shows over HTTP: metrics, and probes."""
