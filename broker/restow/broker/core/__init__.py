"""The broker's state machines, without I/O: events and a time go in, actions come out."""
