"""Bytes of this agent copied, multiplied and hashed, by the kernels."""
