"""Fixtures of the tests of other tools' files."""

from tests.realdata import realdata

__all__ = ["realdata"]
