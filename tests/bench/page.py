"""docs/benchmarks.md: the texts beside this file with the tables of the kept results in them.

In a text, ``{{date}}``, ``{{machine}}``, ``{{method}}`` and ``{{remark}}`` are the result's,
``{{table NAME}}`` is a table of it, ``{{NAME/ROW/COLUMN}}`` one figure and ``{{met
NAME/ROW/COLUMN}}`` says whether its target is met.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.bench.kept import RESULTS, Figure, Result

TEXTS = Path(__file__).parent / "texts"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
ORDER = (
    "capture",
    "compiled",
    "vllm",
    "layer_call",
    "disk",
    "tokens",
    "fold",
    "windows",
    "memory",
    "placement",
    "audit",
    "dashboard",
    "soak",
)


def page(results: Path = RESULTS, texts: Path = TEXTS) -> str:
    """The whole page; a suite that has a text and no result yet is left out."""
    parts = [(texts / "head.md").read_text(encoding="utf-8")]
    for suite in ORDER:
        result, text = Result.load(suite, results), texts / f"{suite}.md"
        if result is not None:
            parts.append(filled(text.read_text(encoding="utf-8"), result))
    return "\n".join(part.strip() + "\n" for part in parts)


def filled(text: str, result: Result) -> str:
    """A text with its placeholders replaced; what a result doesn't have was not measured."""
    return re.sub(r"\{\{(.+?)\}\}", lambda found: _value(found[1].strip(), result), text)


def _value(name: str, result: Result) -> str:
    if name in ("date", "method", "remark"):
        return str(getattr(result, name))
    if name == "machine":
        return str(result.machine)
    if name == "taken":
        return (
            f"{result.method} Measured {result.date} on {result.machine}. {result.remark}".strip()
        )
    if name.startswith("table "):
        return table([one for one in result.figures if one.table == name[6:]])
    wanted = name.removeprefix("met ")
    one = {"/".join(one.key): one for one in result.figures}.get(wanted)
    if one is None:
        return "not measured"
    return {True: "met", False: "**missed**", None: "–"}[one.met] if name != wanted else str(one)


def table(figures: Sequence[Figure]) -> str:
    """Rows and columns in the order in which they first occur."""
    if not figures:
        return "not measured"
    cells = {(one.row, one.column): str(one) for one in figures}
    rows = dict.fromkeys(one.row for one in figures)
    columns = dict.fromkeys(one.column for one in figures)
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Write it."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
