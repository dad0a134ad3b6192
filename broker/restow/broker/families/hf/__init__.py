"""A Hugging Face ``config.json`` becomes a `ModelSpec` here."""
