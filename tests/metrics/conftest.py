from __future__ import annotations

from hypothesis import settings

from tests.realdata import realdata

__all__ = ["realdata"]

# A busy machine is no reason to fail.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
