"""The broker's mind: pure state machines. Events and a time go in, actions come out; no I/O."""
