"""Memory that agents serve: regions, shared memory, CUDA memory and staging."""
