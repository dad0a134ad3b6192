"""A service of the contract is a class here, whose methods translate a call and no more."""
