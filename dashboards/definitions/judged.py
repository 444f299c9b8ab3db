"""What is found: findings and what they say."""

from __future__ import annotations

from routeprof.dashboards.definitions.entry import Definition

JUDGED: dict[str, Definition] = {
    "finding": Definition("Finding", "text", "Stable name of what was found."),
    "severity": Definition(
        "Severity",
        "text",
        "error: what is served or measured is wrong. warning: it costs time or tokens. info: good "
        "to know.",
    ),
    "finding_layers": Definition("Layers", "text", "Layers concerned; none: the whole recording."),
    "finding_phase": Definition("Phase", "text", "Phase that it is about; all: what is selected."),
    "evidence": Definition("Evidence", "text", "The figures behind it."),
    "suggestion": Definition("What to do", "text", "The remedy."),
    "gain": Definition(
        "What it would bring", "text", "As predicted from the recording; empty where it can't be."
    ),
    "errors_found": Definition("Errors", "text", "Findings of that severity on the routing."),
    "warnings_found": Definition("Warnings", "text", "Findings of that severity on the routing."),
    "notes_found": Definition("Notes", "text", "Findings of severity info on the routing."),
    "rules_unjudged": Definition(
        "Not judged",
        "text",
        "Rules that this recording cannot answer. No finding of theirs means nothing.",
    ),
}
