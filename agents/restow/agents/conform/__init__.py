"""Judge KV connectors: which bytes they would bring where, by rules of our own."""
