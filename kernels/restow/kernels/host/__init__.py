"""The tables for host memory: the twin of each kernel, and the path on the CPU."""
