"""Everything that a recording says, with what a remedy would bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from routeprof.diagnose.batches import batch_gain, mixing_gain
from routeprof.diagnose.captured import layers_and_parts
from routeprof.diagnose.changes import drift_since, drift_within
from routeprof.diagnose.finding import Finding, gravest_first
from routeprof.diagnose.gates import low_margin
from routeprof.diagnose.hybrid import hybrid
from routeprof.diagnose.overflow import overflow, overflow_gain
from routeprof.diagnose.placed import cross_node, placement_gain, rank_imbalance
from routeprof.diagnose.question import Answer, Question, Rule
from routeprof.diagnose.ranks import rank_findings
from routeprof.diagnose.remarks import remark_findings
from routeprof.diagnose.routing import dead_experts, small_gemms, too_few
from routeprof.diagnose.skew import skew
from routeprof.diagnose.speed import slower_than_dense
from routeprof.errors import NotKnownError

RULES: dict[str, Rule] = {
    "overflow": overflow,
    "rank-imbalance": rank_imbalance,
    "cross-node": cross_node,
    "drift-since": drift_since,
    "drift-within": drift_within,
    "low-margin": low_margin,
    "slower-than-dense": slower_than_dense,
    "hybrid": hybrid,
}
"""By the code of what they find."""

SKEW = "hot-experts, collapse, narrow-input, model-skew"
"""The codes that tokens enough are needed for."""

GAINS: dict[str, Callable[[Question], str]] = {
    "overflow": overflow_gain,
    "rank-imbalance": placement_gain,
    "narrow-input": mixing_gain,
    "model-skew": placement_gain,
    "hot-experts": placement_gain,
    "small-gemms": batch_gain,
}


def examine(question: Question, *, gains: bool = True) -> Answer:
    """All findings, the gravest first.

    Args:
        gains: also compute what remedies would bring, which takes most of the time.

    Raises:
        UsageError: something asked for that cannot be, such as a GPU that is not known.
    """
    profile, unjudged = question.profile, {}
    found = [*layers_and_parts(profile), *rank_findings(profile, question.now)]
    found += remark_findings(profile)
    if not profile.totals.lists["counts"].sum():
        return Answer(gravest_first(found), dict.fromkeys(RULES, "no tokens were counted"))
    few = too_few(profile, question.limits)
    if few:
        unjudged[SKEW] = few
    skewed, no_cause = skew(question)
    found += [*skewed, *dead_experts(profile), *small_gemms(profile, question.limits)]
    if no_cause:
        unjudged["narrow-input, model-skew"] = no_cause
    for code, rule in RULES.items():
        made = _asked(rule, question)
        if isinstance(made, str):
            unjudged[code] = made
        else:
            found += made
    if gains:
        found = [_with_gain(finding, question) for finding in found]
    return Answer(gravest_first(found), unjudged)


def _asked(rule: Rule, question: Question) -> list[Finding] | str:
    try:
        return rule(question)
    except NotKnownError as error:
        return str(error)


def _with_gain(finding: Finding, question: Question) -> Finding:
    try:
        gain = GAINS[finding.code](question) if finding.code in GAINS else ""
    except NotKnownError:
        gain = ""
    return replace(finding, gain="; ".join(filter(None, (finding.gain, gain))))
