"""Without a GPU, Triton's interpreter runs the kernels on host addresses."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # kernel_arena, kernel_tables

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
