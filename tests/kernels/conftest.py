"""Helpers of these tests are imported by their bare names: the name `kernels` is banned here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # kernel_arena, kernel_tables
