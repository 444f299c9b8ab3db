"""The verdict of ``routeprof check`` as JUnit XML, as Jenkins, GitLab and GitHub actions read it.

Elements and attributes are those that the schema of Jenkins' xUnit plugin (``junit-10.xsd``) knows,
and that pytest writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from routeprof.diagnose.check import CAPTURE, Case, Verdict, cases
from routeprof.diagnose.finding import Finding
from routeprof.report.diagnose import finding_line
from routeprof.report.summary import plain

SUITE = "routeprof check"


def junit(verdict: Verdict, names: Sequence[str], moment: float) -> str:
    """One test case for capture and one for each rule; its properties are what was judged by.

    A rule that could not be judged is skipped, with its reason, or is an error if it was asked for.

    Args:
        names: of the recordings.
        moment: of the check, seconds since the epoch.
    """
    profile = verdict.question.profile
    properties = {
        "recording": ", ".join(names),
        "model": profile.info.model.name,
        "phase": profile.phase or "all",
        "tag": profile.tag or "all",
        **{name: f"{value:g}" for name, value in asdict(verdict.question.limits).items()},
    }
    return _document([_case(case, verdict) for case in cases(verdict)], properties, moment)


def junit_error(message: str, names: Sequence[str], moment: float) -> str:
    """The document of a check that could not be made at all."""
    case = Element("testcase", classname="routeprof", name="check")
    _add(case, "error", "cannot-check", message, message)
    return _document([case], {"recording": ", ".join(names)}, moment)


def _document(made: Sequence[Element], properties: Mapping[str, str], moment: float) -> str:
    counts = {
        "tests": str(len(made)),
        "failures": str(sum(case.find("failure") is not None for case in made)),
        "errors": str(sum(case.find("error") is not None for case in made)),
    }
    skipped = sum(case.find("skipped") is not None for case in made)
    root = Element("testsuites", {"name": "routeprof", **counts})
    stamp = datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    facts = {"name": SUITE, **counts, "skipped": str(skipped), "timestamp": stamp}
    suite = SubElement(root, "testsuite", facts)
    told = SubElement(suite, "properties")
    for name, value in properties.items():
        SubElement(told, "property", name=name, value=plain(value))
    suite.extend(made)
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, "unicode") + "\n"


def _case(case: Case, verdict: Verdict) -> Element:
    group = "routeprof.capture" if case.name == CAPTURE else "routeprof.routing"
    element = Element("testcase", classname=group, name=case.name)
    if case.outcome == "failed":
        grave = [finding for finding in case.findings if finding in verdict.failed]
        first = grave[0]
        text = "\n".join(line for finding in case.findings for line in _lines(finding))
        _add(element, "failure", first.severity, first.evidence, text)
    elif case.outcome == "error":
        _add(element, "error", "not-judged", case.reason, case.reason)
    elif case.outcome == "skipped":
        reason = f"not judged: {case.reason}"
        _add(element, "skipped", "not-judged", reason, reason)
    elif case.findings:
        text = "\n".join(line for finding in case.findings for line in _lines(finding))
        SubElement(element, "system-out").text = text
    return element


def _add(parent: Element, kind: str, category: str, message: str, text: str) -> None:
    element = SubElement(parent, kind, type=category, message=plain(message))
    element.text = "\n".join(map(plain, text.split("\n")))


def _lines(finding: Finding) -> list[str]:
    return [
        finding_line(finding),
        f"  → {plain(finding.suggestion)}",
    ]
