"""Identities and rights of callers, and the files that prove them. Independent of gRPC."""
