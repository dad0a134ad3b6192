"""The `restow` command."""
