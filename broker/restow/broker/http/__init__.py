"""A small HTTP server, for what shows its metrics and says whether it is alive."""
