"""Where the kernels run in this process; importing it skips the importing test module elsewhere."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
EFFORT = 1 if INTERPRETED else 4
"""How many times as many random cases to try."""
