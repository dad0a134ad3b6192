"""Copies, products and hashes of this agent's memory, made by the kernels."""
