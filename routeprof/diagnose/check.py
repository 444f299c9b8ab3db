"""What passes and what fails: one judgement for ``routeprof check``, for tests and for pytest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from routeprof.diagnose.examine import RULES, SKEW, examine
from routeprof.diagnose.finding import SEVERITIES, Finding, Severity
from routeprof.diagnose.question import Answer, Question
from routeprof.diagnose.thresholds import Thresholds
from routeprof.errors import UsageError
from routeprof.whatif.evidence import require_tokens

USUAL_FACTOR = 1.25
"""Capacity that a limit on overflow supposes where none is configured."""

SHORT = {"max_imbalance": "hot_imbalance", "max_rank_imbalance": "rank_imbalance"}
"""Thresholds by what the command line calls them."""

ASKED = {
    "hot_imbalance": SKEW,
    "collapse_share": SKEW,
    "max_overflow": "overflow",
    "capacity_factor": "overflow",
    "rank_imbalance": "rank-imbalance",
    "gpus": "rank-imbalance",
    "cross_node_share": "cross-node",
    "since": "drift-since",
    "model": "hybrid",
    "dense_ratio": "slower-than-dense",
    "margin": "low-margin",
}
"""For a limit or another argument, the rule that must then be judged, by its code."""

CAPTURE = "capture"
"""Stands for all that is said of how complete a recording is."""

ROUTING = (
    *("hot-experts", "collapse", "narrow-input", "model-skew", "step-skew", "hot-cold"),
    *("dead-experts", "small-gemms", *RULES),
)
"""Codes of what is said of routing."""


@dataclass(frozen=True)
class Verdict:
    """What a recording was found to be.

    Attributes:
        failed: findings that are grave enough.
        unknown: what was asked for, or is needed for passing, and cannot be judged: by the code of
            its rule, the sentence that says so.
    """

    question: Question
    answer: Answer
    failed: list[Finding]
    unknown: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether it was judged, and nothing grave enough was found."""
        return not self.failed and not self.unknown


@dataclass(frozen=True)
class Case:
    """What came of one rule.

    Attributes:
        name: code of the rule; ``capture`` for all rules on capture.
        outcome: ``error`` where it had to be judged and could not be.
        reason: why it was not judged; empty if it was.
    """

    name: str
    outcome: str
    findings: tuple[Finding, ...] = ()
    reason: str = ""


def judge(question: Question, asked: Mapping[str, str], fail_on: str = "warning") -> Verdict:
    """Examine without gains, and say whether it passes.

    Args:
        asked: rules that must be judged, by code, and who asks, for the sentence.
        fail_on: least severity that fails.

    Raises:
        UsageError: no such severity.
    """
    grave = severities(fail_on)
    answer = examine(question, gains=False)
    failed = [finding for finding in answer.findings if finding.severity in grave]
    unknown = {
        code: f"{who} cannot be judged: {answer.unjudged[code]}"
        for code, who in asked.items()
        if code in answer.unjudged
    }
    if not failed and not unknown:
        unknown = _needed(question, answer)
    return Verdict(question, answer, failed, unknown)


def severities(least: str) -> tuple[Severity, ...]:
    """This severity and those above.

    Raises:
        UsageError: no such severity.
    """
    if least not in SEVERITIES:
        raise UsageError(f"severity {least!r} is not one of {', '.join(SEVERITIES)}")
    return SEVERITIES[: [*SEVERITIES].index(least) + 1]


def _needed(question: Question, answer: Answer) -> dict[str, str]:
    """What is not known, and must be for a recording to pass."""
    try:
        require_tokens(question.profile)
    except UsageError as error:
        return {SKEW: str(error)}
    few = answer.unjudged.get(SKEW)
    return {SKEW: f"skew cannot be judged: {few}"} if few else {}


def limited(limits: Thresholds, given: Mapping[str, float | None]) -> Thresholds:
    """The limits with others that are given by their names or short names; None keeps one.

    Raises:
        UsageError: no such limit, or one that cannot be.
    """
    known = [item.name for item in fields(Thresholds)]
    names = {SHORT.get(name, name): value for name, value in given.items()}
    for name in given:
        if SHORT.get(name, name) not in known:
            raise UsageError(f"no threshold {name!r}; there are {', '.join([*SHORT, *known])}")
    changed = limits.changed(**names)
    if names.get("max_overflow") is not None and not changed.capacity_factor:
        return changed.changed(capacity_factor=USUAL_FACTOR)
    return changed


def rules_asked(given: Mapping[str, object], shown: Callable[[str], str]) -> dict[str, str]:
    """The rules that must be judged for these arguments, None being none.

    Args:
        shown: what to call an argument in a message.
    """
    asked: dict[str, str] = {}
    for name, value in given.items():
        code = ASKED.get(SHORT.get(name, name))
        if value is not None and code is not None:
            asked.setdefault(code, shown(name))
    return asked


def cases(verdict: Verdict) -> list[Case]:
    """One for capture and one for each rule on routing, always the same and in one order."""
    found: dict[str, list[Finding]] = {name: [] for name in (CAPTURE, *ROUTING)}
    for finding in verdict.answer.findings:
        found[finding.code if finding.code in ROUTING else CAPTURE].append(finding)
    unjudged, unknown = _by_code(_unjudged(verdict)), _by_code(verdict.unknown)
    made = []
    for name, own in found.items():
        if any(finding in verdict.failed for finding in own):
            made.append(Case(name, "failed", tuple(own)))
        elif name in unknown:
            made.append(Case(name, "error", tuple(own), unknown[name]))
        elif name in unjudged and not own:
            made.append(Case(name, "skipped", (), unjudged[name]))
        else:
            made.append(Case(name, "passed", tuple(own)))
    return made


def _unjudged(verdict: Verdict) -> dict[str, str]:
    """Why rules were not judged, also those of which ``examine`` only finds nothing."""
    profile, unjudged = verdict.question.profile, verdict.answer.unjudged
    if not profile.totals.lists["counts"].sum():
        return dict.fromkeys(ROUTING, "no tokens were counted")
    more = {}
    if SKEW in unjudged:
        more = dict.fromkeys(("step-skew", "hot-cold"), unjudged[SKEW])
    if "decode" not in profile.phases:
        more["small-gemms"] = "no decode step is in what is selected"
    return more | unjudged


def _by_code(reasons: Mapping[str, str]) -> dict[str, str]:
    return {code: reason for codes, reason in reasons.items() for code in codes.split(", ")}
