"""Reads from other agents: by NIXL, or by this process where the other is on the same host."""
