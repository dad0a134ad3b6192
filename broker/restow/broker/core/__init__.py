"""The broker's state machines. They do no I/O: they take events and a time, and return actions."""
