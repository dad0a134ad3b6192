"""How a store lays out the states of a model: one rank, everything whole, no gaps."""

from restow.broker.stored.store_layout import least_block_tokens, store_layout

__all__ = ["least_block_tokens", "store_layout"]
