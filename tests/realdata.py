"""Recordings of real models, which are not part of the project."""

from __future__ import annotations

from pathlib import Path

import pytest

REALDATA = Path(__file__).parents[1].parent / "shared" / "realdata"


@pytest.fixture(scope="session")
def realdata() -> Path:
    if not REALDATA.is_dir():
        pytest.skip("recordings of real models (../shared/realdata) are not on this machine")
    return REALDATA
