"""The daemon, which serves ranks of other processes that share their memory with it."""
