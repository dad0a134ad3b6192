"""A small HTTP server for processes that show metrics and answer probes."""
