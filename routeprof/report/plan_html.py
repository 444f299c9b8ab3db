"""``routeprof plan`` as one HTML page, to print or to send on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from routeprof.report import plan_page
from routeprof.report.page import document, escaped, facts, section, table

if TYPE_CHECKING:
    from routeprof.plan.memory import Plan


def plan_html(made: Plan) -> str:
    """The plan as one document."""
    title = f"Memory plan of {escaped(made.model.name)}"
    return document(title, _body(made, title))


def _body(made: Plan, title: str) -> Iterator[str]:
    yield f'<header><h1>{title}</h1><p class="soft">routeprof plan</p></header>'
    yield f"<p><b>{escaped(plan_page.verdict(made))}</b></p>"
    yield facts((name, value, "") for name, value in plan_page.facts(made))
    headings = ("weights", "parameters", "bytes", "share")
    yield section("Weights of the whole model", table(headings, plan_page.parts_rows(made), {0}))
    yield section("Layouts, those first that hold the most", _layouts(made))
    if made.measured is not None:
        headings = ("layer", "expert", "share of its layer", "load ÷ mean")
        yield section("Hottest experts", table(headings, plan_page.hottest_rows(made), set()))
    yield section("How to read it", "\n".join(_notes(made)))


def _layouts(made: Plan) -> str:
    shown = plan_page.columns(made)
    headings = [" ".join(column.heading).strip() for column, _ in shown]
    lines = [[show(row) for _, show in shown] for row in made.splits]
    texts = {number for number, (one, _) in enumerate(shown) if one.name in ("layout", "experts")}
    return table(headings, lines, texts)


def _notes(made: Plan) -> Iterator[str]:
    lines = [
        plan_page.HOW,
        plan_page.HELD,
        *plan_page.formats_text(made),
        plan_page.spanning(made),
        *plan_page.obstacles(made),
        *made.model.notes,
    ]
    return (f"<p>{escaped(line)}</p>" for line in lines if line)
