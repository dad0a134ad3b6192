"""The commands that are programs which run until they are told to stop."""
