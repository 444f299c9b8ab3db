"""Rows of level tokens: are there any, and how many a figure may look at."""

from __future__ import annotations

from routeprof.profile import Profile

NEEDED = "This needs a recording of level tokens; record with level='tokens'."

MOST_IDS = 20_000_000
"""Ids that one figure looks at, which takes about two seconds."""


def has_tokens(profile: Profile) -> bool:
    """Whether ids of single tokens were recorded at all."""
    return profile.has("tokens") and profile.files is not None


def affordable(profile: Profile) -> int:
    """How many layers' ids a figure may look at, at least two."""
    tokens = profile.totals.sums["tokens"].sum(0)
    ids = [int(tokens[place]) * profile.info.layers[place].choices for place in profile.captured]
    return max(2, MOST_IDS * len(ids) // max(sum(ids), 1))
