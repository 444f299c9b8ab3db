"""What failed as annotations of a GitHub workflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from routeprof.diagnose.finding import Finding
from routeprof.report.summary import plain

LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def workflow_commands(failed: Iterable[Finding]) -> Iterator[str]:
    """One workflow command for each finding."""
    for finding in failed:
        message = f"{plain(finding.evidence)} → {plain(finding.suggestion)}"
        yield annotation(LEVELS[finding.severity], f"routeprof: {finding.code}", message)


def annotation(level: str, title: str, message: str) -> str:
    """A workflow command, escaped as GitHub's own toolkit does it (``command.ts``).

    Args:
        level: ``error``, ``warning`` or ``notice``.
    """
    return f"::{level} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
