"""The services of the contract, a class each, whose methods only translate calls."""
