"""Engines, the agents of their ranks, the blocks in use, and what each tenant holds."""
