"""Memory that others read or that is written to: regions, shared memory, CUDA memory, staging."""
