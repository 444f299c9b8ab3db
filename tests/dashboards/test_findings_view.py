from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import routeprof
from routeprof.dashboards.controls import control
from routeprof.dashboards.figures.findings import findings_by_layer
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.live.memo import Memo
from routeprof.dashboards.panels import diagnosis
from routeprof.dashboards.panels.finding_list import SEEN, finding_list
from routeprof.dashboards.state import ViewState, parse_query
from routeprof.dashboards.view import Content, Context
from routeprof.dashboards.views import VIEWS, findings, health, overview
from routeprof.diagnose import Finding, completeness
from routeprof.diagnose.examine import GAINS, RULES, examine
from routeprof.diagnose.question import Answer, Question
from routeprof.sample_data import RECORDINGS_DIR
from tests.commands.conftest import Cli, cli
from tests.dashboards.made import HOSTILE, Writer
from tests.dashboards.tokens import context_of, record_tokens
from tests.diagnose.made import Step, record

Make = Callable[..., Context]

__all__ = ["cli"]

COLLAPSED = RECORDINGS_DIR / "collapsed"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_tokens(tmp_path_factory.mktemp("findings") / "run", "code", HOSTILE, rows=6)


def text_of(parts: Any) -> str:
    return json.dumps(parts, default=lambda item: item.to_plotly_json(), ensure_ascii=False)


def nodes(parts: Any, kind: str) -> list[Any]:
    """All components of a kind, in the order of the page."""
    if isinstance(parts, list | tuple):
        return [found for part in parts for found in nodes(part, kind)]
    if not hasattr(parts, "_type"):
        return []
    inner = nodes(getattr(parts, "children", None), kind)
    return [parts, *inner] if parts._type == kind else inner


def codes(content: Content) -> list[str]:
    """Of the list of findings."""
    return [node.children for node in nodes(list(content.lead), "Code")]


def command(content: Content) -> list[str]:
    (shown,) = nodes(list(content.body), "Pre")
    return shlex.split(shown.children.children)


# -- the quick ones


def test_the_quick_ones_are_those_on_the_routing(context: Make) -> None:
    view = context()
    content = findings.fill(view)
    trust = completeness(view.profile, view.now)
    routing = [one for one in view.profile.findings(view.now) if one not in trust]
    assert trust
    assert codes(content) == [one.code for one in routing] != []
    shown = text_of(list(content.lead))
    for one in routing:
        assert one.suggestion in shown
    assert f"{len(trust)} findings on what was captured, on Health" in shown
    assert "computed where it is asked for" in text_of(list(content.body))
    assert {card.note for card in content.cards} == {"by the quick rules", "not computed"}
    assert content.cards[-1].value == "–"


def test_nothing_is_examined_unless_asked_for(
    context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "examine", None)  # whose call would raise
    assert codes(findings.fill(context()))


def test_health_and_findings_share_the_list_without_repeating_it(context: Make) -> None:
    view = context(gains="yes")
    trust, routing = codes(health.fill(view)), codes(findings.fill(view))
    assert trust
    assert not set(trust) & set(routing)
    assert "silent-layers" in trust
    every = [one.code for one in view.profile.findings(view.now)]
    assert codes(overview.fill(view)) == every[:3]


# -- all of them


@pytest.mark.parametrize(
    "state", [{}, {"ranks": 8}, {"ranks": 4, "phase": "decode"}, {"tag": HOSTILE, "ranks": 2}]
)
def test_all_rules_and_gains_are_those_of_examine(tokens: Path, state: dict[str, Any]) -> None:
    view = context_of(tokens, gains="yes", **state)
    answer = examine(Question(view.profile, gpus=state.get("ranks"), hardware="h100"))
    trust = completeness(view.profile)
    expected = [one for one in answer.findings if one not in trust]
    content = findings.fill(view)
    table = content.panels["where"].table
    assert table["finding"].tolist() == [one.code for one in expected] == codes(content)
    assert table["gain"].fillna("").tolist() == [one.gain for one in expected]
    assert table["evidence"].tolist() == [one.evidence for one in expected]
    shown = text_of([*content.lead, *content.body])
    assert all(one.gain in shown for one in expected)
    assert all(code in shown and why in shown for code, why in answer.unjudged.items())
    values = {card.name: card.value for card in content.cards}
    tones = {card.name: card.tone for card in content.cards}
    for severity, name in (("warning", "warnings_found"), ("info", "notes_found")):
        number = sum(one.severity == severity for one in expected)
        assert values[name] == str(number)
        assert tones[name] == ("bad" if severity == "warning" and number else "")
    assert values["rules_unjudged"] == str(len(answer.unjudged))


def test_the_command_that_is_shown_says_the_same(cli: Cli) -> None:
    view = context_of(COLLAPSED, gains="yes", ranks=8, phase="decode")
    content = findings.fill(view)
    program, *words = command(content)
    assert (program, words[0]) == ("routeprof", "diagnose")
    done = cli(*(COLLAPSED if word == "RECORDING" else word for word in words), "--json")
    said = json.loads(done.stdout)
    table = content.panels["where"].table
    assert [one["evidence"] for one in said["findings"]] == table["evidence"].tolist()
    assert [one["gain"] for one in said["findings"]] == table["gain"].fillna("").tolist()
    unjudged = nodes(list(content.body), "Li")
    assert [item.children[0].children for item in unjudged] == list(said["unjudged"])


def test_the_figure_marks_the_layers_of_each_finding() -> None:
    view = context_of(COLLAPSED, gains="yes", ranks=8)
    filled = findings.fill(view).panels["where"]
    (trace,) = filled.figure.data  # findings of other severities name no layers
    assert trace.name == "warning"
    marks = sorted(zip(trace.y, (int(at) for at in trace.x), strict=True))
    answer = examine(Question(view.profile, gpus=8, hardware="h100"))
    assert marks == sorted((one.code, at) for one in answer.findings for at in one.layers)
    assert filled.figure.layout.yaxis.autorange == "reversed"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_severities_differ_in_shape_and_the_gravest_is_on_top(scheme: Any) -> None:
    found = [("collapse", "error", (2,)), ("skew", "warning", (0, 2)), ("dead", "info", (5,))]
    figure = findings_by_layer(found, {4: "silent"}, scheme)
    assert [trace.name for trace in figure.data] == ["error", "warning", "info"]
    assert len({trace.marker.symbol for trace in figure.data}) == 3
    assert len({trace.marker.color for trace in figure.data}) == 3
    assert [list(trace.y) for trace in figure.data] == [["collapse"], ["skew", "skew"], ["dead"]]
    assert list(figure.layout.yaxis.categoryarray) == ["collapse", "skew", "dead"]
    assert [line.text for line in figure.layout.annotations] == ["silent"]


# -- links


def test_links_lead_to_views_with_the_selection() -> None:
    layers = {"one": (3,), "several": (1, 2)}
    state = ViewState(phase="prefill", tag="code", ranks=4, gains="yes")
    for code in SEEN:
        for own in layers.values():
            finding = Finding(code, "info", "evidence", "suggestion", own, figures={"layer": 2})
            link = nodes(finding_list("Title", [finding], state, ""), "Link")[-1]
            path, _, query = link.href.partition("?")
            (view,) = [view for view in VIEWS if f"/{view.path}" == path]
            assert link.children == f"see {view.title}"
            found, _ = parse_query(query, view_profile())
            assert (found.tag, found.ranks) == ("code", 4)
            if view.path == "layer":
                assert found.layer == (3 if len(own) == 1 else 2)
            assert found.phase == ("decode" if code == "small-gemms" else "prefill")


def view_profile() -> Any:
    return routeprof.load(RECORDINGS_DIR / "healthy")


def test_every_rule_and_gain_leads_to_a_view() -> None:
    every = {*RULES, *GAINS, "collapse", "dead-experts", "step-skew", "hot-cold"}
    assert every - {"drift-since"} <= set(SEEN)  # it needs another recording, which no page has


# -- what cannot be computed


def test_nothing_counted_is_not_nothing_found(writer: Writer) -> None:
    content = findings.fill(context_of(writer.path, gains="yes"))
    assert "nothing to judge" in text_of(list(content.lead))
    assert {card.value for card in content.cards} == {"–"}
    assert "nothing to judge" in str(content.panels["where"].figure.layout.annotations[0].text)


def test_nothing_found_is_said(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "routing_findings", lambda *_: [])
    assert findings.NOTHING_QUICK in text_of(list(findings.fill(context_of(tokens)).lead))
    monkeypatch.setattr(diagnosis, "examine", lambda _: Answer([], {}))
    content = findings.fill(context_of(tokens, gains="yes"))
    assert findings.NOTHING in text_of(list(content.lead))
    assert "Every rule was judged" in text_of(list(content.body))
    assert [card.value for card in content.cards] == ["0"] * 4


@pytest.mark.parametrize("gains", ["no", "yes"])
def test_few_tokens_are_not_nothing_found(tmp_path: Path, gains: str) -> None:
    counts = [2, 0] * 7 + [1, 1]
    content = findings.fill(
        context_of(record(tmp_path / "run", [Step([counts, counts])]), gains=gains)
    )
    assert "needs 16 assignments an expert" in text_of(list(content.body))
    many = record(tmp_path / "many", [Step([counts, counts])] * 16)
    assert "assignments an expert" not in text_of(
        list(findings.fill(context_of(many, gains=gains)).body)
    )


@pytest.mark.parametrize("bound", ["MOST_TOKENS", "MOST_FITS", "MOST_CELLS"])
def test_too_much_is_left_to_the_command(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(diagnosis, bound, 1)
    view = context_of(tokens, gains="yes", ranks=4)
    content = findings.fill(view)
    assert "more than a page can judge" in text_of(list(content.body))
    assert codes(content) == codes(findings.fill(context_of(tokens)))
    assert command(content) == shlex.split("routeprof diagnose RECORDING --gpus 4")


def test_it_is_examined_once_for_a_version_a_selection_and_gpus(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def spy(question: Question) -> Answer:
        asked.append(question.gpus)
        return examine(question)

    monkeypatch.setattr(diagnosis, "examine", spy)
    view = replace(context_of(tokens, gains="yes"), version="1", answers=Memo(8))
    findings.fill(view)
    findings.fill(replace(view, scheme="dark", state=replace(view.state, layer=1)))
    assert asked == [None]
    findings.fill(replace(view, state=replace(view.state, ranks=4)))
    findings.fill(replace(view, version="2"))
    assert asked == [None, 4, None]


def test_controls_offer_what_there_is(tokens: Path) -> None:
    opened = Library(tokens).open("?gains=yes&ranks=6")
    assert not opened.ignored
    gains, gpus = (control(name, opened, [], findings.VIEW.controls) for name in ("gains", "ranks"))
    assert [item["label"] for item in gains.data] == ["Not computed", "Computed"]
    assert (gains.value, gpus.label, gpus.value) == ("yes", "GPUs", "6")
    assert gpus.data[0]["label"] == "Not recorded"


def test_hostile_tags_are_one_word_and_no_markup(tokens: Path) -> None:
    content = findings.fill(context_of(tokens, gains="yes", tag=HOSTILE))
    assert command(content)[-2:] == ["--tag", HOSTILE]
    assert "<img" not in content.panels["where"].figure.to_json()
