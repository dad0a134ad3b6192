"""Restow in SGLang 0.5.23: the linker of its unified radix cache to states that others hold.

``linker`` is what SGLang calls. ``pools`` makes a rank's layout of SGLang's memory pools, ``tree``
finds the tokens and slots that a call is about, ``keeping`` finds, requests and hands over states
through the broker, and ``ranks`` lets rank 0 speak for all ranks.
"""
