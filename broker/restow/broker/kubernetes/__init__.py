"""Brokers as Lease objects of a Kubernetes: who is there, and who owns which pool."""
