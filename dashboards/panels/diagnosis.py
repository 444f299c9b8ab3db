"""What the rules say of a selection: the quick ones at once, all of them where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from routeprof.dashboards.panels.batches import MOST_FITS, fits
from routeprof.dashboards.panels.command_line import sentence
from routeprof.dashboards.panels.stepwise import is_too_long
from routeprof.dashboards.panels.token_rows import has_tokens
from routeprof.dashboards.view import Context
from routeprof.diagnose import DEFAULTS, Finding, completeness, gravest_first
from routeprof.diagnose.batches import MIXED
from routeprof.diagnose.examine import examine
from routeprof.diagnose.question import Question
from routeprof.diagnose.routing import routing_findings, too_few
from routeprof.errors import RouteprofError
from routeprof.profile import Profile
from routeprof.whatif.requests.served import served_requests

MOST_TOKENS = 2_000_000
"""Tokens times layers that a page still judges."""

MOST_CELLS = 10_000_000
"""(window, layer, expert) sums that a page still judges, which takes about five seconds."""

UNASKED = (
    "These are the quick rules. Ranks, drift, causes of skew, margins, speed, and what remedies "
    "would bring, are computed where it is asked for: choose “Rules and gains” in the dashboard, "
    "or run routeprof diagnose."
)
TOO_MUCH = (
    "This selection is more than a page can judge with all rules: narrow it, or use the command "
    "below. These are the quick ones."
)
NO_TOKENS = "No tokens were counted in what is selected: there is nothing to judge."


@dataclass(frozen=True)
class Judged:
    """Findings on the routing, the gravest first.

    Attributes:
        unjudged: for each rule that could not be judged, why; None where only the quick ones were.
        why: in that case, why.
    """

    findings: list[Finding]
    unjudged: Mapping[str, str] | None = None
    why: str = ""
    trust: list[Finding] = field(default_factory=list)
    """Findings on whether all of it was captured, which Health lists."""


def judged(context: Context) -> Judged:
    """What is wrong with the routing of what is selected."""
    profile, trust = context.profile, completeness(context.profile, context.now)
    if not profile.totals.lists["counts"].sum():
        return Judged([], None, NO_TOKENS, trust)
    quick = gravest_first(routing_findings(profile, DEFAULTS))
    if context.state.gains != "yes":
        few = too_few(profile, DEFAULTS)
        return Judged(quick, None, f"Skew {few}. {UNASKED}" if few else UNASKED, trust)
    found = context.once(("diagnosed", context.state.ranks), lambda: _examined(context))
    if isinstance(found, str):
        return Judged(quick, None, found, trust)
    return Judged(found.findings, found.unjudged, "", trust)


def _examined(context: Context) -> Judged | str:
    """All rules and gains, without what Health says; or why not."""
    profile = context.profile
    if _is_too_much(profile):
        return TOO_MUCH
    try:
        answer = examine(Question(profile, gpus=context.state.ranks, hardware="h100"))
    except RouteprofError as error:
        return sentence(error)
    trust = completeness(profile)
    return Judged([one for one in answer.findings if one not in trust], answer.unjudged)


def _is_too_much(profile: Profile) -> bool:
    if is_too_long(profile):
        return True
    if has_tokens(profile) and int(profile.totals.sums["tokens"].sum()) > MOST_TOKENS:
        return True
    if _has_many_requests(profile):
        return True
    experts = max((layer.experts for layer in profile.info.layers), default=0)
    return len(profile.totals.windows.end) * experts > MOST_CELLS


def _has_many_requests(profile: Profile) -> bool:
    """Whether composing mixed batches of them, which gains may take, would take too long."""
    if not has_tokens(profile) or profile.phase is not None:
        return False
    try:
        return fits(served_requests(profile, "decode"), MIXED) > MOST_FITS
    except RouteprofError:
        return False
