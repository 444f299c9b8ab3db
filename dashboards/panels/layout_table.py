"""Every layout of a number of GPUs, as a table; and why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan

import pandas as pd

from routeprof.dashboards.controls import MOST_GPUS
from routeprof.dashboards.panels.command_line import sentence
from routeprof.dashboards.panels.stepwise import is_too_long
from routeprof.dashboards.view import Context
from routeprof.errors import LevelRequiredError, RouteprofError
from routeprof.profile import Profile
from routeprof.rank_loads import usual_ranks
from routeprof.whatif.hardware import Hardware, hardware
from routeprof.whatif.layout import layouts
from routeprof.whatif.layout_sums import Setting
from routeprof.whatif.layouts import Prediction, Predictions, predict
from routeprof.whatif.sizes import least_experts, sizes_of

MOST_WORK = 2_000_000
"""Tokens times layers times layouts; of more, a page looks at some of the steps only."""

MOST_TOKENS = 5_000_000
"""Tokens times layers that a page still reads."""

TOO_MUCH = (
    "This selection has more tokens than a page can go through: narrow it, or use the command "
    "below."
)
PARTS = ("attention", "dispatch", "experts", "combine")
COLUMNS = (
    "layout_attention layout_experts step_ms attention_ms dispatch_ms experts_ms combine_ms "
    "straggler_factor ranks_per_token nodes_per_token sent_inside sent_between layout_weights "
    "gemm_mean_tokens small_gemm_share"
).split()
_MIB = 2.0**20


@dataclass(frozen=True)
class Ranked:
    """Layouts that were looked at.

    Attributes:
        made: their predictions, the quickest first; where times are not known, that with the least
            of those that are.
        width: whether the recording says how wide an expert is.
    """

    gpus: int
    nodes: int
    gpu: Hardware
    made: Predictions
    width: bool

    @property
    def known(self) -> tuple[str, ...]:
        """Parts of a step whose time is known for every layout."""
        return tuple(name for name in PARTS if all(_part(row, name) >= 0 for row in self.made.rows))

    @property
    def is_ranked(self) -> bool:
        """Whether the time of a step is known for every layout."""
        return self.known == PARTS

    @property
    def table(self) -> pd.DataFrame:
        """One row a layout."""
        return pd.DataFrame([_row(row) for row in self.made.rows], columns=COLUMNS)


def ranked(context: Context) -> Ranked | str:
    """Every layout of the chosen GPUs, or one line that says why there are none."""
    state = context.state
    gpus = state.ranks or usual_ranks(context.whole)[0]
    if gpus > MOST_GPUS:
        return f"A page looks at {MOST_GPUS} GPUs at most: choose fewer, or use the command below."
    question = ("layouts", gpus, state.nodes, state.gpu)
    return context.once(question, lambda: _ranked(context.profile, gpus, state.nodes, state.gpu))


def _ranked(profile: Profile, gpus: int, nodes: int, gpu: str) -> Ranked | str:
    try:
        if is_too_long(profile) or int(profile.step_counts().tokens.sum()) > MOST_TOKENS:
            return TOO_MUCH
        width = profile.info.model.expert_width is not None
        # Any width: what follows from it is left out again.
        setting = Setting(sizes_of(profile, width=None if width else 1), hardware(gpu))
        wanted = layouts(gpus, least_experts(profile), nodes)
        made = predict(profile, wanted, setting, most_work=MOST_WORK)
    except LevelRequiredError as error:
        return f"{sentence(error)} Level tokens also tells what GPUs send each other."
    except RouteprofError as error:
        return sentence(error)
    if not width:
        made = replace(made, rows=tuple(_without_width(row) for row in made.rows))
    found = Ranked(gpus, nodes, setting.gpu, made, width)
    return found if found.is_ranked else _by_known_parts(found)


def _without_width(row: Prediction) -> Prediction:
    return replace(row, experts_ms=nan, expert_bytes=nan)


def _by_known_parts(found: Ranked) -> Ranked:
    def order(row: Prediction) -> tuple[float, float]:
        return sum(_part(row, name) for name in found.known), row.straggler_factor

    rows = tuple(sorted(found.made.rows, key=order))
    return replace(found, made=replace(found.made, rows=rows))


def _part(row: Prediction, name: str) -> float:
    return float(getattr(row, f"{name}_ms"))


def _row(one: Prediction) -> Sequence[object]:
    attention, experts = str(one.layout).split(", ")
    return (
        attention,
        experts,
        one.total_ms,
        *(_part(one, name) for name in PARTS),
        one.straggler_factor,
        one.ranks_per_token,
        one.nodes_per_token,
        (one.dispatch_inside + one.combine_inside) / _MIB,
        (one.dispatch_between + one.combine_between) / _MIB,
        one.expert_bytes / _MIB,
        one.tokens_per_gemm,
        one.small_gemm_share,
    )
