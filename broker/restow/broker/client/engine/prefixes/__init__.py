"""States by their content, as an engine says and hears of them."""
