"""The verdict in files that machines read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import routeprof
from routeprof.diagnose.check import ROUTING, Verdict, judge, limited, rules_asked
from routeprof.diagnose.finding import Finding
from routeprof.diagnose.question import Answer, Question
from routeprof.diagnose.thresholds import DEFAULTS
from routeprof.report.github import annotation, workflow_commands
from routeprof.report.junit import junit, junit_error
from tests.diagnose.made import EXPERTS, Step, one_hot, record, steady

ATTRIBUTES = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": set("name tests failures errors time skipped timestamp hostname id".split()),
    "testcase": {"name", "time", "classname"},
    "property": {"name", "value"},
    **{tag: {"type", "message"} for tag in ("failure", "error", "skipped")},
}
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase"},
    "properties": {"property"},
    "testcase": {"skipped", "error", "failure", "system-out"},
}
HOSTILE = "<&\"']]>\x00\x1b\u202e\ufffe\n::error::%0A"


def judged(run: Path, **given: float) -> Verdict:
    limits = limited(DEFAULTS, given)
    question = Question(routeprof.load(run), limits)
    return judge(question, rules_asked(given, str))


def read(text: str) -> dict[str, ElementTree.Element]:
    """The test cases of a document, which holds only what readers know."""
    root = ElementTree.fromstring(text.encode())
    for element in root.iter():
        assert set(element.attrib) <= ATTRIBUTES.get(element.tag, set()), element.tag
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
    (suite,) = root
    cases = suite.findall("testcase")
    assert suite.get("tests") == root.get("tests") == str(len(cases))
    for kind, tag in {"failures": "failure", "errors": "error", "skipped": "skipped"}.items():
        assert suite.get(kind) == str(sum(case.find(tag) is not None for case in cases))
    assert suite.get("timestamp") == "2001-09-09T01:46:40"
    named = {case.attrib["name"]: case for case in cases}
    assert len(named) == len(cases)
    return named


def outcomes(verdict: Verdict) -> dict[str, str]:
    cases = read(junit(verdict, ["run"], 1e9))
    tags = ("failure", "error", "skipped")
    return {
        name: next((tag for tag in tags if case.find(tag) is not None), "passed")
        for name, case in cases.items()
    }


def test_each_rule_is_a_case_whatever_was_found(tmp_path: Path):
    even = judged(record(tmp_path / "even", steady(np.ones(EXPERTS))))
    hot = judged(record(tmp_path / "hot", steady(one_hot(4))))
    assert list(outcomes(even)) == list(outcomes(hot)) == ["capture", *ROUTING]
    assert "failure" not in outcomes(even).values()
    assert [name for name, out in outcomes(hot).items() if out == "failure"] == ["hot-experts"]
    case = read(junit(hot, ["run"], 1e9))["hot-experts"]
    (failure,) = case
    assert failure.get("type") == "warning"
    assert "gets 4.00 times the mean" in failure.attrib["message"]
    assert "→ compare tags" in str(failure.text)


def test_what_is_not_judged_is_skipped_and_says_why(tmp_path: Path):
    verdict = judged(record(tmp_path / "run", steady(np.ones(EXPERTS), phase="prefill")))
    cases = read(junit(verdict, ["run"], 1e9))
    for code, reason in verdict.answer.unjudged.items():
        for name in code.split(", "):
            skipped = cases[name].find("skipped")
            assert skipped is not None
            assert skipped.get("message") == f"not judged: {reason}"
    assert outcomes(verdict)["small-gemms"] == "skipped"  # there is no decode


def test_what_was_asked_for_and_is_not_known_is_an_error(tmp_path: Path):
    run = record(tmp_path / "run", steady(one_hot(1.9)), level="windows")
    verdict = judged(run, capacity_factor=1.6)
    assert outcomes(verdict)["overflow"] == "error"
    assert not verdict.passed
    assert not verdict.failed


def test_few_tokens_pass_nothing(tmp_path: Path):
    counts = [2, 0] * 7 + [1, 1]
    verdict = judged(record(tmp_path / "run", [Step([counts, counts])]))
    told = outcomes(verdict)
    assert {told[name] for name in ("hot-experts", "collapse", "model-skew")} == {"error"}
    assert told["step-skew"] == "skipped"


def test_without_tokens_no_rule_on_routing_passes(tmp_path: Path):
    run = record(tmp_path / "run", [Step([None, None])])
    told = outcomes(judged(run))
    assert told["capture"] == "failure"
    assert {told[name] for name in ROUTING} == {"skipped"}


def test_any_text_gives_xml_that_can_be_read(tmp_path: Path):
    even = judged(record(tmp_path / "run", steady(np.ones(EXPERTS))))
    found = [Finding("hot-experts", "error", HOSTILE, HOSTILE), Finding("x", "info", HOSTILE, "")]
    answer = Answer(found, {"overflow": HOSTILE})
    verdict = replace(even, answer=answer, failed=found[:1], unknown={"hybrid": HOSTILE})
    cases = read(junit(verdict, [HOSTILE], 1e9))
    failure = cases["hot-experts"].find("failure")
    assert failure is not None
    assert failure.attrib["message"].startswith("<&\"']]>")
    assert outcomes(verdict)["hybrid"] == "error"
    (broken,) = read(junit_error(HOSTILE, [HOSTILE], 1e9)).values()
    assert broken.find("error") is not None


def commands(line: str) -> tuple[str, dict[str, str], str]:
    """Reads a workflow command as GitHub's runner does (``ActionCommand.cs``)."""
    match = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line)
    assert match, line
    properties = dict(part.split("=", 1) for part in match[2].split(","))

    def plain(text: str, codes: dict[str, str]) -> str:
        for code, char in codes.items():
            text = text.replace(code, char)
        return text

    lines = {"%0D": "\r", "%0A": "\n"}
    named = {
        name: plain(value, lines | {"%3A": ":", "%2C": ",", "%25": "%"})
        for name, value in properties.items()
    }
    return match[1], named, plain(match[3], lines | {"%25": "%"})


@pytest.mark.parametrize("text", ["a: b, c=d :: 100%", "two\r\nlines", "%0A stays %25"])
def test_an_annotation_is_read_as_it_was_written(text: str):
    line = annotation("warning", text, text)
    assert len(line.splitlines()) == 1
    assert commands(line) == ("warning", {"title": text}, text)


def test_annotations_have_the_severity_and_the_remedy():
    found = [Finding("a", one, "50%\n::stop", "do") for one in ("error", "warning", "info")]
    told = [commands(line) for line in workflow_commands(found)]
    assert [level for level, _, _ in told] == ["error", "warning", "notice"]
    assert {title["title"] for _, title, _ in told} == {"routeprof: a"}
    assert {text for *_, text in told} == {"50%�::stop → do"}
