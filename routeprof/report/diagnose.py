"""``routeprof diagnose`` and ``routeprof check`` as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from routeprof.diagnose.finding import layer_list
from routeprof.report.summary import json_data, plain, selection_text

if TYPE_CHECKING:
    from routeprof.diagnose.check import Verdict
    from routeprof.diagnose.finding import Finding
    from routeprof.diagnose.question import Answer, Question

STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def answer_json(answer: Answer, question: Question) -> dict[str, Any]:
    """Findings with all digits, what could not be judged, and the limits, for JSON."""
    data: dict[str, Any] = json_data(
        {
            "phase": question.profile.phase or "all",
            "tag": question.profile.tag or "all",
            "findings": [asdict(finding) for finding in answer.findings],
            "unjudged": answer.unjudged,
            "thresholds": asdict(question.limits),
        }
    )
    return data


def print_answer(answer: Answer, question: Question, console: Console) -> None:
    """The same as text, the gravest first."""
    for part in _parts(answer, question):
        console.print(part, highlight=False)


def _parts(answer: Answer, question: Question) -> Iterator[RenderableType]:
    yield Text(selection_text(question.profile), "dim")
    if not answer.findings:
        yield "no findings"
    for finding in answer.findings:
        yield ""
        yield from _finding(finding)
    if answer.unjudged:
        yield Text("\nnot judged", "bold")
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for code, reason in answer.unjudged.items():
            table.add_row(Text(f"  {code}", "dim"), Text(plain(reason), "dim"))
        yield table


def _finding(finding: Finding) -> Iterator[RenderableType]:
    head = Text(f"{finding.severity}: ", STYLES[finding.severity], end="")
    yield Text.assemble(head, f"[{finding.code}] ", plain(finding.evidence))
    kind = "layer" if len(finding.layers) == 1 else "layers"
    where = f"{kind} {layer_list(finding.layers)}" if finding.layers else ""
    where += f"{'; ' if where else ''}{finding.phase}" if finding.phase != "all" else ""
    lines = [where, f"→ {plain(finding.suggestion)}"]
    lines += [f"= {plain(finding.gain)}"] if finding.gain else []
    for line in filter(None, lines):
        yield Padding(Text(line, "dim" if line == where else ""), (0, 0, 0, 2))


# -- check


def check_json(verdict: Verdict) -> dict[str, Any]:
    """What failed, whether anything did, and what could not be judged, for JSON."""
    return {
        "passed": verdict.passed,
        "failed": [finding.code for finding in verdict.failed],
        **answer_json(verdict.answer, verdict.question),
    }


def check_lines(verdict: Verdict) -> Iterator[str]:
    """One line for each finding that failed; or one that says that none did."""
    yield from map(finding_line, verdict.failed)
    if not verdict.failed:
        others = len(verdict.answer.findings)
        yield f"passed{f'; {others} of lower severity, see routeprof diagnose' if others else ''}"


def finding_line(finding: Finding) -> str:
    """A finding in one line."""
    return f"{finding.severity}: {finding.code}: {plain(finding.evidence)}"
