"""Who may say what: identities, and the files that prove them. Knows no wire."""
