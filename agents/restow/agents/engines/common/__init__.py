"""What the adapter of any engine needs to take part in handoffs and to share prefixes.

An adapter builds its layout, registers (`registration`), follows requests as P and as D
(`prefill_decode`) and names their blocks (`blocks`). `prefix_sharing` shares what the engine's
prefix cache holds.
"""
