"""The `restow` command lives here."""
