"""From rows, tokens and page ids to addresses, with numpy alone."""
