"""Ranks that are served for other processes, which share their memory."""
