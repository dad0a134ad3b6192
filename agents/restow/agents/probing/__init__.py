"""Measure what reading and copying cost, and find the transport that reads a peer."""
