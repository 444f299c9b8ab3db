"""Findings: what a reader of the numbers must know first, and what the numbers say.

`findings` is quick, for pages that ask again and again. `examine` also looks at tags, steps, ranks
and other recordings, and says what a remedy would bring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from routeprof.diagnose.captured import layers_and_parts
from routeprof.diagnose.finding import (
    SEVERITIES,
    Finding,
    Severity,
    gravest_first,
    layer_list,
)
from routeprof.diagnose.ranks import STALE_SECONDS, rank_findings
from routeprof.diagnose.remarks import remark_findings
from routeprof.diagnose.routing import routing_findings
from routeprof.diagnose.thresholds import DEFAULTS, Thresholds, read_thresholds

if TYPE_CHECKING:
    from routeprof.profile import Profile

HOT_IMBALANCE = DEFAULTS.hot_imbalance
"""A hottest expert at three times the mean: the field's 3 : 1 rule of thumb."""

COLLAPSE_SHARE = DEFAULTS.collapse_share
"""Two experts that take this share of a layer with many more experts."""

__all__ = [
    "COLLAPSE_SHARE",
    "DEFAULTS",
    "HOT_IMBALANCE",
    "SEVERITIES",
    "STALE_SECONDS",
    "Finding",
    "Severity",
    "Thresholds",
    "completeness",
    "findings",
    "gravest_first",
    "layer_list",
    "read_thresholds",
]


def findings(
    profile: Profile, now: float | None = None, limits: Thresholds = DEFAULTS
) -> list[Finding]:
    """All findings, the gravest first; what was not captured comes before what was."""
    return gravest_first([*completeness(profile, now), *routing_findings(profile, limits)])


def completeness(profile: Profile, now: float | None = None) -> list[Finding]:
    """What was not captured, and what went wrong while it was."""
    return [*layers_and_parts(profile), *rank_findings(profile, now), *remark_findings(profile)]
