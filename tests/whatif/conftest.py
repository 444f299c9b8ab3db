from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from tests.realdata import realdata

__all__ = ["realdata"]

# A busy machine is no reason to fail.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def decode_load(realdata: Path) -> np.ndarray:
    """DeepSeek-V3 under decode, the 58 layers with experts."""
    path = realdata / "sglang-dsv3" / "decode_in2000out100.json"
    return np.array(json.loads(path.read_text())["logical_count"])[3:]
