"""What each number means: the one place where the page's names, units and definitions are."""

from __future__ import annotations

from routeprof.dashboards.definitions.entry import Definition, Kind
from routeprof.dashboards.definitions.judged import JUDGED
from routeprof.dashboards.definitions.planned import PLANNED
from routeprof.dashboards.definitions.predicted import PREDICTED
from routeprof.dashboards.definitions.recorded import RECORDED

__all__ = ["DEFINITIONS", "Definition", "Kind", "definition"]

DEFINITIONS: dict[str, Definition] = RECORDED | PREDICTED | JUDGED | PLANNED


def definition(name: str) -> Definition:
    """The definition of a column; an unknown one stands for itself."""
    return DEFINITIONS.get(name, Definition(name, "text", ""))
