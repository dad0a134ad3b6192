"""Copies, products and hashes, made by kernels."""
