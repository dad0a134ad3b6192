"""The interpreter of programs, and what an order needs before, between and after its reads."""
