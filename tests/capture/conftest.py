"""What tests of a recorder start from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def random():
    return np.random.default_rng(31)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "recording"
