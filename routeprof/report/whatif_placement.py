"""``routeprof whatif placement`` as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table

from routeprof.report.summary import NONE, json_data
from routeprof.report.text import plain_table

if TYPE_CHECKING:
    from routeprof.formats.placements import Written
    from routeprof.whatif.comparison import Comparison, RankBalance
    from routeprof.whatif.decision import Decision

SUMS_ALONE = "held_out: needs level steps, record with level='steps'; this recording has sums alone"
ONE_STEP = "held_out: needs two steps or more, the selection has one"
WORSE = (
    "held_out: on later steps worse than what is there today, as the traffic changed between the "
    "halves; select what stays alike with --tag or --phase, or record longer"
)
COLUMNS = {
    "before": "before",
    "eplb": "EPLB",
    "routeprof": "routeprof",
    "lower_bound": "lower bound",
}


def placement_json(
    made: Comparison, asked: dict[str, Any], *, level: str, layers: bool
) -> dict[str, Any]:
    """``fitted`` and, where there are steps, ``held_out``: means over the layers, for JSON.

    Args:
        asked: what to repeat of the question.
        level: of the recording.
        layers: also a row for each layer.
    """
    data: dict[str, Any] = {**asked, "before_is": made.before}
    for name, steps, part in _parts(made):
        data |= {name: part.means(), f"{name}_steps": steps or None}
    if remark := remark_on(made, level):
        data["note"] = remark
    if layers:
        data["layers"] = [
            {
                "layer": index,
                **{name: _of_layer(part, place) for name, _, part in _parts(made)},
            }
            for place, index in enumerate(made.layers)
        ]
    plain_data: dict[str, Any] = json_data(data)
    return plain_data


def print_placement(made: Comparison, console: Console, *, level: str, layers: bool) -> None:
    """The same as text."""
    for part in _lines(made, level, layers):
        console.print(part, highlight=False)


def written_json(decision: Decision, files: Written) -> dict[str, Any]:
    """What was written, for JSON; ``fitted_steps`` is null where there were sums alone."""
    data: dict[str, Any] = json_data(
        {
            "files": [str(file) for file in files.files],
            "left_out": files.left_out,
            "fitted_steps": decision.steps or None,
            "moved_experts": decision.moved,
            "layers_without_tokens": decision.unmeasured,
        }
    )
    return data


def print_written(made: Comparison, decision: Decision, files: Written, console: Console) -> None:
    """The same as text."""
    for line in _written_lines(made, decision, files):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def remark_on(made: Comparison, level: str) -> str:
    """Why nothing is held out, or what the held out steps warn of; empty where they do not."""
    if made.held_out is None:
        return SUMS_ALONE if level == "windows" else ONE_STEP
    held_out = made.held_out.means()
    return WORSE if held_out["routeprof"] > held_out["before"] else ""


def _parts(made: Comparison) -> Iterator[tuple[str, int, RankBalance]]:
    yield "fitted", made.steps[0], made.fitted
    if made.held_out is not None:
        yield "held_out", made.steps[1], made.held_out


def _of_layer(part: RankBalance, place: int) -> dict[str, float]:
    return {name: float(values[place]) for name, values in vars(part).items()}


def _lines(made: Comparison, level: str, layers: bool) -> Iterator[RenderableType]:
    figure = "rank load by speed" if made.speeds else "rank load"
    yield f"{figure}, max ÷ mean; loads of all steps added up\n"
    yield _table(made, layers)
    yield ""
    yield f"before: {made.before}"
    if remark := remark_on(made, level):
        yield remark


def _written_lines(made: Comparison, decision: Decision, files: Written) -> Iterator[str]:
    if decision.steps:
        yield f"\nwritten, fitted on all {decision.steps:,} steps (the figures: on the first half):"
    else:
        yield "\nwritten, fitted on the sums as the figures:"
    yield from (f"  {file}" for file in files.files)
    yield from (f"  not {name}: {reason}" for name, reason in files.left_out.items())
    if decision.moved is not None:
        yield f"experts that come to another GPU than {made.before}: {decision.moved:,}"
    if decision.unmeasured:
        layers = ", ".join(map(str, decision.unmeasured))
        yield f"layers without tokens, as today or in order: {layers}"


def _table(made: Comparison, layers: bool) -> Table:
    table = plain_table()
    table.add_column("layer")
    table.add_column("judged on", no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [("mean", name, steps, part.means()) for name, steps, part in _parts(made)]
    for place, index in enumerate(made.layers if layers else ()):
        rows += [
            (str(index), name, steps, _of_layer(part, place)) for name, steps, part in _parts(made)
        ]
    for layer, name, steps, figures in rows:
        judged = name.replace("_", " ") + (f", {steps:,} steps" if steps else "")
        table.add_row(layer, judged, *(_figure(figures[key]) for key in COLUMNS))
    return table


def _figure(value: float) -> str:
    return NONE if isnan(value) else f"{value:.3f}"
