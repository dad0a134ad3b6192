"""Turn rows, tokens and page ids into addresses, with numpy alone."""
