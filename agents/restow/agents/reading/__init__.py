"""Read from other agents, by NIXL or directly from another process of the same host."""
