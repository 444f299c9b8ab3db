"""Layouts: which split of the GPUs would be quickest?"""

from __future__ import annotations

from typing import Any

import pandas as pd

from routeprof.dashboards import formats
from routeprof.dashboards.components import told
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.layouts import layout_bars
from routeprof.dashboards.panels.command_line import command_line
from routeprof.dashboards.panels.layout_table import COLUMNS, PARTS, Ranked, ranked
from routeprof.dashboards.state import GPUS
from routeprof.dashboards.view import Card, Content, Context, Filled, Panel, View
from routeprof.rank_loads import usual_ranks
from routeprof.whatif.layouts import Prediction

SHOWN = 12
"""Layouts that are drawn; the table has them all."""

NO_TOKENS = "what GPUs send each other needs level tokens: record with level='tokens'"
NO_WIDTH = (
    "the experts' time needs the width of an expert, which this recording lacks: pass "
    "--expert-width, the model's moe_intermediate_size, to the command below"
)


def fill(context: Context) -> Content:
    """The page's content."""
    found = ranked(context)
    body = [limits(context, found)]
    if isinstance(found, str):
        nothing = Filled(blank(found, context.scheme), "", pd.DataFrame(columns=COLUMNS))
        return Content(panels={"layouts": nothing}, body=body)
    return Content(panels={"layouts": bars(context, found)}, cards=cards(found), body=body)


def bars(context: Context, found: Ranked) -> Filled:
    """The quickest layouts, and all of them in the table."""
    table = found.table if found.nodes > 1 else found.table.drop(columns=_BETWEEN)
    if not found.known:
        return Filled(blank(_unknown(found), context.scheme), "", table)
    top = found.table.head(SHOWN)
    names = (top["layout_attention"] + "<br>" + top["layout_experts"]).tolist()
    parts = {name: top[f"{name}_ms"].to_numpy() for name in found.known}
    return Filled(layout_bars(names, parts, context.scheme), _caption(context, found), table)


_BETWEEN = ["nodes_per_token", "sent_between"]


def cards(found: Ranked) -> list[Card]:
    """The quickest layout and what it gains."""
    rows = found.made.rows
    if not found.is_ranked:
        return [Card("layout_quickest", formats.NOTHING, _unknown(found))]
    best = rows[0]
    sent = best.dispatch_between + best.combine_between
    where = "layout_sent_between"
    if found.nodes == 1:
        sent, where = best.dispatch_inside + best.combine_inside, "layout_sent_inside"
    return [
        Card("layout_quickest", str(best.layout), f"{_time(best)} a step"),
        Card(
            "straggler_factor",
            formats.ratio(best.straggler_factor),
            "of the quickest; experts in order",
        ),
        Card(where, formats.size(sent), "a step, of the quickest"),
        Card(
            "layout_gain",
            formats.times_as(_tensor_parallel(found).total_ms / best.total_ms),
            f"the slowest of {len(rows)} takes {rows[-1].total_ms / best.total_ms:,.1f} times as "
            "long",
        ),
    ]


def _tensor_parallel(found: Ranked) -> Prediction:
    """All GPUs share attention and each expert."""
    return next(row for row in found.made.rows if row.layout.dp == row.layout.ep == 1)


def _time(row: Prediction) -> str:
    return formats.seconds(row.total_ms / 1e3)


def _unknown(found: Ranked) -> str:
    """What is needed for the times that are missing."""
    missing = [
        text
        for text, known in ((NO_TOKENS, found.made.traffic), (NO_WIDTH, found.width))
        if not known
    ]
    text = "; ".join(missing)
    return f"{text[:1].upper()}{text[1:]}."


def _caption(context: Context, found: Ranked) -> str:
    made = found.made
    some = f", one in {made.every:,} of those selected" if made.every > 1 else ""
    order = (
        "The quickest first."
        if found.is_ranked
        else f"Only {' and '.join(found.known)}, which is not the whole of a step. "
        f"{_unknown(found)}"
    )
    nodes = f" on {found.nodes} nodes" if found.nodes > 1 else ""
    shown = f" {SHOWN} of {len(made.rows)} layouts." if len(made.rows) > SHOWN else ""
    return (
        f"Time of a step, all MoE layers together, on {formats.plural(found.gpus, 'GPU')}{nodes}; "
        f"{context.selection}; {formats.plural(made.steps, 'step')}{some}. Attention is its "
        f"all-reduce. {order}{shown}"
    )


def limits(context: Context, found: Ranked | str) -> Any:
    """What the times leave out, and the command that says more."""
    state = context.state
    gpus = state.ranks or usual_ranks(context.whole)[0]
    line = command_line(
        context, "layout", gpus=gpus, nodes=state.nodes if state.nodes > 1 else None, gpu=state.gpu
    )
    rates = f" Rates of {GPUS[state.gpu]}: {found.gpu.source}." if isinstance(found, Ranked) else ""
    text = (
        "Times are of the MoE layers' experts and exchanges and of attention's all-reduce, at peak "
        "rates, one after another. Attention itself, shared experts, the router, what kernels do "
        "not reach and overlap are left out: they compare layouts on the recorded load, and are no "
        f"latencies. Each recorded step is one batch for all GPUs; experts are in order.{rates} "
        "The command has more options: placements, rates, FP8."
    )
    return told("What the times are of", text, line)


VIEW = View(
    path="layouts",
    title="Layouts",
    question="Which split of the GPUs would be quickest?",
    reports=(),
    panels=(
        Panel(
            "layouts",
            "Time of a step by layout",
            "Bar chart: time of a step of the quickest layouts, by "
            f"{', '.join(PARTS[:-1])} and {PARTS[-1]}",
            height=500,
        ),
    ),
    fill=fill,
    controls=("between", "ranks", "nodes", "gpu"),
)
