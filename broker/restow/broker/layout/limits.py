"""Bounds of a layout: so that whatever numbers come in, the work is bounded."""

from __future__ import annotations

MAX_RANKS = 1024
MAX_RANK_NUMBER = 2**31 - 1
MAX_SHARDS = 1 << 18
"""Of all ranks; and as many fields, and as many regions."""
MAX_GROUPS = 1024
MAX_WORD_LENGTH = 256
"""Of each part of a model's identity beside its name: errors give them whole."""
MAX_AXES = 16
MAX_PAGE_BYTES = 1 << 36
MAX_AXIS_SIZE = MAX_PAGE_BYTES * MAX_RANKS
MAX_PAGES_PER_BLOCK = 1 << 20
MAX_BLOCK = 2**31 - 1
"""Block ids travel as int32."""
MAX_TOKENS = 2**31 - 1
"""Positions travel as int32."""
MAX_RUNS = 1 << 21
"""Runs of bytes that all pages of different form fall into, together."""
MAX_BOXES_OF_A_FIELD = 4096
MAX_TAPS = 256
MAX_HIDDEN = 1 << 20
MAX_CHANNELS = 1 << 32
