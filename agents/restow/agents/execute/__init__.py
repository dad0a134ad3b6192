"""Interpret programs, and do what an order needs before, between and after its reads."""
