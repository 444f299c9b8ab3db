"""Assertions on routing, for tests.

Importing this imports neither torch nor pandas.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routeprof.diagnose.check import Verdict
    from routeprof.diagnose.thresholds import Thresholds
    from routeprof.profile import Profile

__all__ = ["assert_balanced"]


def assert_balanced(
    profile: Profile | str | Path,
    *,
    max_imbalance: float | None = None,
    max_overflow: float | None = None,
    max_rank_imbalance: float | None = None,
    capacity_factor: float | None = None,
    gpus: int | None = None,
    since: Profile | str | Path | None = None,
    phase: str | None = None,
    tag: str | None = None,
    fail_on: str = "warning",
    config: str | Path | None = None,
    **thresholds: float,
) -> None:
    """Fail unless ``routeprof check`` with the same arguments passes.

    What was not captured, and what is asked for and cannot be judged, fails too.

    Args:
        profile: what was recorded, or its directory.
        max_imbalance: load of the hottest expert ÷ mean, of a layer and of a tag; 3 if unset.
        max_overflow: share of assignments above capacity.
        max_rank_imbalance: load of the fullest rank ÷ mean rank.
        capacity_factor: of the engine; 1.25 if it is unset and ``max_overflow`` is not.
        gpus: expert-parallel ranks to judge.
        since: an earlier recording of the model, to look for drift.
        phase, tag: only of these.
        fail_on: least severity that fails: info, warning or error.
        config: TOML file with a table ``thresholds``.
        thresholds: other limits, by their names in ``docs/diagnose.md``.

    Raises:
        AssertionError: something was found, or cannot be judged; the text says what.
        UsageError: an argument that cannot be right.
    """
    __tracebackhide__ = True
    given = {
        "max_imbalance": max_imbalance,
        "max_overflow": max_overflow,
        "max_rank_imbalance": max_rank_imbalance,
        "capacity_factor": capacity_factor,
        **thresholds,
    }
    limits = _limits(config, given)
    verdict = _judged(profile, limits, given, gpus, since, (phase, tag), fail_on)
    if not verdict.passed:
        raise AssertionError(_text(verdict))


def check_limits(
    *, config: str | Path | None = None, fail_on: str = "warning", **given: Any
) -> None:
    """Refuse arguments that `assert_balanced` would refuse, as far as no recording is needed.

    Raises:
        UsageError: an argument that cannot be right.
    """
    from routeprof.diagnose.check import severities

    severities(fail_on)
    others = ("gpus", "since", "phase", "tag")
    _limits(config, {name: value for name, value in given.items() if name not in others})


def _limits(config: str | Path | None, given: dict[str, float | None]) -> Thresholds:
    from routeprof.diagnose.check import limited
    from routeprof.diagnose.thresholds import DEFAULTS, read_thresholds

    return limited(DEFAULTS if config is None else read_thresholds(Path(config)), given)


def _judged(
    profile: Profile | str | Path,
    limits: Thresholds,
    given: dict[str, float | None],
    gpus: int | None,
    since: Profile | str | Path | None,
    selection: tuple[str | None, str | None],
    fail_on: str,
) -> Verdict:
    from time import time

    from routeprof.diagnose.check import judge, rules_asked
    from routeprof.diagnose.question import Question

    phase, tag = selection
    question = Question(
        _profile(profile).select(phase=phase, tag=tag),
        limits,
        since=None if since is None else _profile(since).narrowed(phase, tag),
        gpus=gpus,
        now=time(),
    )
    return judge(question, rules_asked({**given, "gpus": gpus, "since": since}, str), fail_on)


def _profile(given: Profile | str | Path) -> Profile:
    from routeprof.profile import Profile, load

    return given if isinstance(given, Profile) else load(given)


def _text(verdict: Verdict) -> str:
    from routeprof.report.diagnose import finding_line

    lines = ["the routing is not as it must be"]
    for finding in verdict.failed:
        lines += [f"  {finding_line(finding)}", f"    → {finding.suggestion}"]
    return "\n".join([*lines, *(f"  {message}" for message in verdict.unknown.values())])
