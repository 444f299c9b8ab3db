"""Plan: would the model fit on these GPUs, and with how many sequences?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from dash import html
from numpy.typing import NDArray

from routeprof.dashboards import formats
from routeprof.dashboards.components import plain_table, told
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.memory import memory_bars
from routeprof.dashboards.panels.key_groups import phase_and_tag
from routeprof.dashboards.panels.memory_plan import (
    COLUMNS,
    WEIGHTS,
    Planned,
    plan_line,
    planned,
    sequences_text,
)
from routeprof.dashboards.view import Card, Content, Context, Filled, Panel, View
from routeprof.plan.memory import GIB
from routeprof.plan.parameters import total
from routeprof.report.plan_page import (
    HOW,
    PART_NAMES,
    billions,
    dtypes,
    facts,
    formats_text,
    loads_text,
    obstacles,
    spanning,
    verdict,
)

SHOWN = 10
"""Layouts that are drawn; the table has them all."""


def fill(context: Context) -> Content:
    """The page's content."""
    found = planned(context)
    line = plan_line(context, found)
    more = "More options: types of parts, reserves, the size of a prefill chunk, hot experts."
    if isinstance(found, str):
        nothing = Filled(blank(found, context.scheme), "", pd.DataFrame(columns=COLUMNS))
        body = [told("From the command line", more, line)]
        return Content(panels={"memory": nothing}, body=body)
    body = [
        hottest(found),
        stated(notes(context, found)),
        told("From the command line", more, line),
    ]
    return Content(panels={"memory": bars(context, found)}, cards=cards(found), body=body)


def bars(context: Context, found: Planned) -> Filled:
    """The layouts that hold the most, and all of them in the table."""
    table, made = found.table, found.made
    top = table.head(SHOWN)
    names = top["layout_attention"]
    if made.model.moes:
        names = names + "<br>" + top["layout_experts"]
    names = names + np.where(top["obstacle"].notna(), " (cannot run)", "")
    memory = made.setting.memory / GIB
    figure = memory_bars(names.tolist(), _parts(top), memory, context.scheme)
    shown = f" {SHOWN} of {len(table)} layouts are drawn." if len(table) > SHOWN else ""
    caption = (
        f"Memory of the fullest of {formats.plural(made.gpus, 'GPU')} by layout, with the cache of "
        f"{formats.plural(made.setting.batch, 'sequence')} of {made.setting.length:,} tokens. "
        f"{_sentence(verdict(made))} A bar past the line does not fit.{shown}"
    )
    return Filled(figure, caption, table)


def _parts(top: pd.DataFrame) -> Mapping[str, NDArray[Any]]:
    """What is drawn of each layout, GiB; what is not known is not drawn."""
    parts = {
        name: top[WEIGHTS[part]].to_numpy()
        for part, name in PART_NAMES.items()
        if WEIGHTS[part] in top
    }
    kv = top["kv_gib"].to_numpy()
    state = top["state_gib"].to_numpy() if "state_gib" in top else np.zeros(len(top))
    left = top["cache_room_gib"].to_numpy()
    known = not np.isnan(kv + state).any()
    if known:
        parts["KV cache"] = kv
        if "state_gib" in top:
            parts["fixed state"] = state
    parts["held back"] = top["held_back_gib"].to_numpy()
    rest = left - kv - state if known else left
    parts["free" if known else "left for the cache"] = np.where(rest > 0, rest, np.nan)
    return parts


def cards(found: Planned) -> list[Card]:
    """Whether it fits, and how much."""
    made, best = found.made, found.best
    fitting = sum(row.fits is True for row in made.splits)
    unknown = any(row.fits is None for row in made.splits)
    active = made.model.active
    length = f"{made.setting.length:,} tokens each"
    return [
        Card(
            "plan_fits",
            formats.NOTHING if unknown else f"{fitting} of {len(made.splits)}",
            "the cache's size is not known" if unknown else str(best.layout) if best else "none",
            "" if fitting or unknown else "bad",
        ),
        Card(
            "parameters",
            billions(total(made.model.weights)),
            f"{formats.NOTHING if active is None else billions(active)} active",
        ),
        Card("weights_whole", formats.size(made.weights_bytes), dtypes(made)),
        Card(
            "weights_best",
            formats.size(best.weights_bytes) if best else formats.NOTHING,
            f"of {formats.size(made.setting.memory)}" if best else "no layout is known to fit",
        ),
        Card(
            "most_sequences",
            sequences_text(best.sequences) if best else formats.NOTHING if unknown else "0",
            length if best else "no layout is known to fit",
        ),
    ]


def hottest(found: Planned) -> Any:
    """The experts that the recording found hottest."""
    if found.made.measured is None:
        return None
    rows = [
        (one.layer, one.expert, one.share, one.over_mean) for one in found.made.measured.hottest()
    ]
    table = pd.DataFrame(rows, columns="layer expert share load_over_mean".split())
    return plain_table("Hottest experts, as recorded", table)


def stated(lines: Iterable[str]) -> Any:
    """Short lines one below the other."""
    title = "What is stated and what is computed"
    parts = [html.P(line, className="caption") for line in lines]
    return html.Section([html.H2(title), *parts], className="panel wide", **{"aria-label": title})


def notes(context: Context, found: Planned) -> Iterator[str]:
    """What the plan takes from where."""
    made, setting = found.made, found.made.setting
    yield _of(context, found)
    yield (
        f"Stated: a reserve of {formats.percent(setting.reserve)} of the memory, "
        f"{formats.size(setting.runtime)} for CUDA context, NCCL and the engine, "
        f"{formats.size(setting.graphs)} for CUDA graphs, passes of at most "
        f"{setting.step_tokens:,} tokens on a replica, {setting.precision.state} states, "
        f"{setting.precision.cache} keys and values."
    )
    yield (
        "Computed: weights by part, keys and values, fixed states, activations and all-to-all "
        "buffers of one pass. Held back is the larger of the reserve and of activations, buffers, "
        "runtime and CUDA graphs."
    )
    yield found.uneven or _sentence(f"experts {loads_text(made)}, with experts in order")
    if not found.uneven:
        yield f"Loads are of {phase_and_tag(context)}, all of the time."
    yield f"A sequence {dict(facts(made))['a sequence']}."
    yield _sentence(HOW)
    yield from (f"Format: {line}." for line in formats_text(made))
    rest = [spanning(made), *obstacles(made), *made.model.notes]
    yield from (_sentence(line) for line in rest if line)


def _of(context: Context, found: Planned) -> str:
    """Whose plan it is."""
    name = found.made.model.name
    if found.own and not found.name:
        return f"The plan is of {name}, by the configuration that its recording has."
    if found.own:
        return (
            f"The plan is of {name}, as the recorded model has its family, width, experts and "
            "top-k."
        )
    return f"The plan is of {name}, which is not what was recorded here."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


VIEW = View(
    path="plan",
    title="Plan",
    question="Does the model fit on these GPUs, and how many sequences beside it?",
    reports=(),
    panels=(
        Panel(
            "memory",
            "Memory of a GPU by layout",
            "Bar chart: bytes of the fullest GPU in each layout by part, with the GPU's memory as "
            "a line",
            height=620,
        ),
    ),
    fill=fill,
    controls=("model", "ranks", "nodes", "memory", "dtype", "length", "batch"),
)
