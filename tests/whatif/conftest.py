from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

# A busy machine is no reason to fail.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

REALDATA = Path(__file__).parents[2].parent / "shared" / "realdata"


@pytest.fixture(scope="session")
def realdata() -> Path:
    if not REALDATA.is_dir():
        pytest.skip("recordings of real models (../shared/realdata) are not on this machine")
    return REALDATA


@pytest.fixture(scope="session")
def decode_load(realdata: Path) -> np.ndarray:
    """DeepSeek-V3 under decode, the 58 layers with experts."""
    path = realdata / "sglang-dsv3" / "decode_in2000out100.json"
    return np.array(json.loads(path.read_text())["logical_count"])[3:]
