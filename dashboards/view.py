"""What a view is: a question, and a pure function from a profile to what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from routeprof.dashboards import formats
from routeprof.dashboards.figures.palette import Scheme
from routeprof.dashboards.live.activity import Activity
from routeprof.dashboards.live.memo import Memo
from routeprof.dashboards.live.spans import Span
from routeprof.dashboards.panels.stepwise import LayerSteps, whole_steps
from routeprof.dashboards.state import ViewState, usual_factor
from routeprof.profile import Profile
from routeprof.tables import column
from routeprof.topology import Layer

Value = TypeVar("Value")
Exact: TypeAlias = Callable[[], Profile]
"""Gives the selected time, all phases and tags, with every window of the timeline.

It may raise RouteprofError, where the recording cannot be read any more.
"""


@dataclass(frozen=True)
class Against:
    """Another recording to compare with: the same phase and tag, all of its time.

    Attributes:
        whole, profile, exact: as of ``Context``.
        message: one line for the reader; empty when all is well.
        version: another one for everything that there is to be seen of it.
    """

    name: str
    whole: Profile
    profile: Profile
    message: str = ""
    version: str = ""
    exact: Exact | None = None


@dataclass(frozen=True)
class Context:
    """What a view draws from.

    Attributes:
        whole: the recording; ``profile``: what the reader selected of it.
        now: seconds since the epoch.
        against: what to compare it with, on views that have that control.
        spans: sums of stretches of time, of all phases and tags, the earliest first.
        name: of the recording.
        apart: it is one of those whose sum is open, and has a time of its own.
        timed: the selected time with all phases and tags, where only a part is selected.
        version: another one for everything else than ``state`` that there is to be seen; empty
            where it is not known.
        answers: what was computed of selections, for all pages.
        exact: what ``timed`` leaves out; None while parts are still to be read.
    """

    whole: Profile
    profile: Profile
    state: ViewState
    scheme: Scheme
    activity: Activity
    now: float
    against: Against | None = None
    spans: Sequence[Span] = ()
    name: str = ""
    timed: Profile | None = None
    apart: bool = False
    version: str = ""
    answers: Memo[Any] | None = None
    exact: Exact | None = None

    def once(self, question: Hashable, answer: Callable[[], Value]) -> Value:
        """An answer that depends on the selection and the question alone, computed once.

        However often a page is drawn of them: of another layer, in other colours.
        """
        if self.answers is None or not self.version:
            return answer()
        key = (self.version, self.state.selection, question)
        found: Value = self.answers.get(key, answer)
        return found

    @cached_property
    def all_time(self) -> Profile:
        """The phase and tag that are selected, in all of the time."""
        return self.whole.narrowed(self.state.phase, self.state.tag)

    @cached_property
    def all_tags(self) -> Profile:
        """The selected time with all phases and tags."""
        if self.timed is not None or self.state.between is None:
            return self.timed or self.whole
        return self.whole.select(between=self.whole.since_start(self.state.between))

    @cached_property
    def steps(self) -> dict[int, LayerSteps]:
        """Steps of the selection's layers where all are known, see ``whole_steps``."""
        return whole_steps(self.profile)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """``Profile.layers`` of the selection."""
        return self.profile.layers()

    @cached_property
    def absent(self) -> dict[int, str]:
        """State of each MoE layer that has no counts in the selection, by its index."""
        pairs = zip(self.profile.info.layers, self.profile.states, strict=True)
        return {layer.index: state for layer, state in pairs if state not in ("captured", "dense")}

    @cached_property
    def layer(self) -> Layer | None:
        """The layer to look at: the chosen one, else the worst."""
        if self.state.layer is not None:
            return self.whole.layer(self.state.layer)
        ratios = column(self.layers, "imbalance_ratio")
        if has_values(ratios):
            return self.whole.layer(int(self.layers["layer"].iloc[int(np.nanargmax(ratios))]))
        return next((layer for layer in self.whole.info.layers if layer.kind == "moe"), None)

    @property
    def factor(self) -> float | None:
        """The chosen capacity factor, else the usual one."""
        if self.state.factor is not None:
            return self.state.factor
        return usual_factor(self.whole)

    @property
    def selection(self) -> str:
        """The selection in words, to begin a caption with."""
        state = self.state
        parts = [
            state.phase or "all phases",
            f"tag {state.tag}" if state.tag else "all tags",
            *([formats.time_range(*state.between)] if state.between else []),
        ]
        return ", ".join(parts)

    def row(self, layer: Layer) -> Mapping[str, Any]:
        """The layer's row of ``layers``."""
        rows = self.layers[self.layers["layer"] == layer.index]
        return {str(name): value for name, value in rows.iloc[0].items()} if len(rows) else {}


@dataclass(frozen=True)
class Card:
    """A key figure.

    Attributes:
        name: of its definition.
        note: small print below the value.
        tone: ``bad`` draws the eye.
    """

    name: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Panel:
    """A place for a figure.

    Attributes:
        label: says to a screen reader what it shows.
        leads: what a click on it opens: the layer at its x, the expert that its customdata
            names, or the expert of a heatmap's cell.
        drags: its x axis is time, and dragging selects a range of it.
    """

    name: str
    title: str
    label: str
    height: int = 340
    wide: bool = True
    leads: Literal["", "layer", "expert", "cell"] = ""
    drags: bool = False


@dataclass(frozen=True)
class Filled:
    """A figure, what to know about it, and its numbers."""

    figure: go.Figure
    caption: str
    table: pd.DataFrame


@dataclass(frozen=True)
class Content:
    """Everything on a view that depends on the recording.

    Attributes:
        lead, body: what stands above and below the figures.
    """

    panels: Mapping[str, Filled]
    cards: Sequence[Card] = ()
    lead: Sequence[Any] = ()
    body: Sequence[Any] = ()


@dataclass(frozen=True)
class View:
    """One page of the dashboard.

    Attributes:
        path: its address, without the slash.
        question: what it answers.
        reports: CSV reports that hold its numbers.
        controls: names of ViewState that it lets the reader choose.
    """

    path: str
    title: str
    question: str
    reports: tuple[str, ...]
    panels: tuple[Panel, ...]
    fill: Callable[[Context], Content]
    controls: tuple[str, ...] = field(default=())


def has_values(values: Any) -> bool:
    """Whether at least one value is known."""
    return bool(len(values)) and bool(np.isfinite(np.asarray(values, dtype=float)).any())
