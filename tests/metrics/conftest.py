from __future__ import annotations

from pathlib import Path

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
