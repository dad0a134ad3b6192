"""The broker as a gRPC service: it translates between messages and the core, and no more."""
