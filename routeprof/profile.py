"""Profile: the folded, in-memory view of a recording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof import tables, timetables
from routeprof.affinity_tables import affinity_table, repetition_table, transition_table
from routeprof.converted import as_recording
from routeprof.detail import StepTable, read_steps
from routeprof.diagnose import Finding, findings
from routeprof.errors import EmptyRecordingError, LevelRequiredError, NotKnownError, UsageError
from routeprof.rank_loads import rank_loads_table
from routeprof.ranks import ranks_table
from routeprof.recording.fold import Key, Progress, Totals, fold
from routeprof.recording.merge import open_recordings
from routeprof.recording.reader import RANKS_PER_RUN, RecordingFiles
from routeprof.recording.schema import RecordingInfo
from routeprof.requests import ranks_of_request, requests_table
from routeprof.token_parts import TokenParts, TokenTable, layer_tokens
from routeprof.topology import LEVELS, PHASES, Layer

if TYPE_CHECKING:
    import plotly.graph_objects as go

State = Literal["captured", "silent", "idle", "unsupported", "dense"]


_READINGS = 20
"""Of a recording that is compacted meanwhile, whose parts are gone when they are to be read."""


def load(
    path: str | Path | Iterable[str | Path],
    *more: str | Path,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Read a recording, finished or still being written; several are added up.

    Directories of one run (the same ``id`` or the same ``run`` in ``recording.json``) are put
    together rank by rank; other directories are further runs of the same model.

    Args:
        path: a recording's directory, its address (``s3://bucket/runs/a``, or another of
            `routeprof.recording.places`), or a file of another tool (`routeprof.formats`), or
            several.
        more: further directories.
        executor: any ``concurrent.futures`` executor to read the parts with; the result does not
            depend on it.
        progress: called now and then with the number of parts read and of all.

    Raises:
        NotARecordingError: there is no recording at a path.
        NewerSchemaError: it was written by a newer routeprof.
        EmptyRecordingError: there are parts and none of them can be read.
        OverlapError: two directories hold the same rank of one run.
        MismatchError: ranks or recordings have different layers under the same index.
    """
    first = [path] if isinstance(path, str) or not isinstance(path, Iterable) else list(path)
    paths = [as_recording(one) for one in (*first, *more)]
    for _ in range(_READINGS):
        files = open_recordings(paths)
        parts = files.parts("part")
        totals = fold(parts, files.info, executor=executor, progress=progress)
        if not totals.unread or all(part.path.exists() for part in parts):
            break
    if parts and len(totals.unread) == len(parts):
        where = ", ".join(str(directory) for directory in files.directories)
        raise EmptyRecordingError(
            f"no part of {where} can be read ({totals.unread[0]}); restore it from a copy"
        )
    return Profile(files.info, totals, files)


@dataclass(frozen=True)
class Profile:
    """Counts and statistics of one or more recordings, or of the phase and tag selected.

    Sums are over the ranks that own the tokens they see; tensor-parallel twins are left out.

    Attributes:
        info: model, layers, level.
        totals: the sums; ``docs/recording.md`` explains them.
        files: where it was read from; None for a profile made in memory.
        phase, tag, between: what is selected; None for all.
    """

    info: RecordingInfo
    totals: Totals
    files: RecordingFiles | None = None
    phase: str | None = None
    tag: str | None = None
    between: tuple[float, float] | None = None

    # -- what there is

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """Phases that occur, in the order of ``topology.PHASES``."""
        present = {phase for phase, _ in self.totals.keys}
        return tuple(phase for phase in PHASES if phase in present)

    @cached_property
    def tags(self) -> tuple[str | None, ...]:
        """Tags that occur, the untagged (None) first."""
        return tuple(sorted({tag for _, tag in self.totals.keys}, key=lambda tag: tag or ""))

    @cached_property
    def states(self) -> tuple[State, ...]:
        """For each layer of ``info.layers``: was it captured?"""
        calls, steps = self.totals.sums["calls"].sum(0), self.totals.sums["steps"].sum(0)
        return tuple(
            _state(layer, int(calls[position]), int(steps[position]))
            for position, layer in enumerate(self.info.layers)
        )

    def in_state(self, state: State) -> tuple[int, ...]:
        """Indices of the layers in that state."""
        pairs = zip(self.info.layers, self.states, strict=True)
        return tuple(layer.index for layer, own in pairs if own == state)

    @property
    def captured(self) -> list[int]:
        """Positions in ``info.layers`` of the layers that were captured."""
        return [place for place, state in enumerate(self.states) if state == "captured"]

    @property
    def layer_indices(self) -> list[int]:
        """Index of the layer in each row of ``counts``."""
        return [self.info.layers[position].index for position in self.captured]

    # -- the numbers

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Assignments, int64 [captured layers, experts]; rows are ``layer_indices``.

        A layer that was not captured has no row. Where layers differ in their number of
        experts, the array is masked beyond a layer's own.
        """
        positions = self.captured
        layers = [self.info.layers[position] for position in positions]
        widest = max((layer.experts for layer in layers), default=0)
        counts: NDArray[np.int64] = self.totals.lists["counts"].sum(0)[positions][:, :widest]
        if len({layer.experts for layer in layers}) <= 1:
            return counts
        experts = np.array([layer.experts for layer in layers])
        beyond = np.arange(widest)[None, :] >= experts[:, None]
        return np.ma.MaskedArray(counts, mask=beyond)

    @cached_property
    def coverage(self) -> float:
        """Captured assignments ÷ assignments the engine made; NaN where that is not known.

        Layers that never ran a hook count with what they should have captured.
        """
        captured, made = tables.coverage_terms(self)
        return float(captured.sum() / made.sum()) if made.sum() else float("nan")

    @property
    def is_whole(self) -> bool:
        """Whether nothing is selected."""
        return (self.phase, self.tag, self.between) == (None, None, None)

    @cached_property
    def missed_by_layer(self) -> NDArray[np.int64]:
        """Tokens of passes that could not be counted, int64 [layers]; 0 of a selection.

        A pass that a rank missed is missing in the layers that it holds.
        """
        missed = np.zeros(len(self.info.layers), dtype=np.int64)
        indices = [layer.index for layer in self.info.layers]
        for rank in self.files.ranks if self.files and self.is_whole else ():
            if rank.state is not None and rank.owns_tokens:
                own = [not rank.passes or index in rank.passes for index in indices]
                missed[own] += int(rank.state.problems.get("missed_tokens", 0))
        return missed

    @property
    def missed_tokens(self) -> int:
        """Tokens that could not be counted in the layer that missed the most."""
        return int(self.missed_by_layer.max(initial=0))

    def since_start(self, between: tuple[float, float]) -> tuple[float, float]:
        """A range in seconds since the first window's start, as seconds since the epoch.

        A tenth of a millisecond later: seconds since the epoch are no finer than a microsecond's
        fraction, and a window that ends where the range does is meant.
        """
        start = self.totals.windows.start
        zero = (float(start.min()) if len(start) else self.info.started) + 1e-4
        return zero + between[0], zero + between[1]

    @property
    def seconds(self) -> float:
        """Time from the first window's start to the last one's end, added up over runs.

        NaN where something was routed at a time that nobody knows.
        """
        windows = self.totals.windows
        if not len(windows.window) and self.totals.sums["calls"].any():
            return float("nan")
        run = windows.rank // RANKS_PER_RUN
        return sum(
            float(windows.end[run == one].max() - windows.start[run == one].min())
            for one in np.unique(run)
        )

    # -- narrowing

    def select(
        self,
        *,
        phase: str | None = None,
        tag: str | None = None,
        between: tuple[float, float] | None = None,
        executor: Executor | None = None,
    ) -> Profile:
        """The part of the recording with this phase, this tag, and in these windows.

        Args:
            tag: a tag, or ``untagged`` for what has none.
            between: seconds since the epoch; windows that end after the first and not after the
                second are kept. Their largest step imbalance is exact at level steps, else it
                may be of an earlier window.
            executor: any ``concurrent.futures`` executor to read these windows with.

        Raises:
            UsageError: the phase or the tag does not occur.
        """
        profile = self._between(between, executor) if between is not None else self
        if phase is not None and phase not in self.phases:
            raise UsageError(f"phase {phase!r} does not occur; there are {_listed(self.phases)}")
        names = [tables.tag_name(name) for name in self.tags]
        if tag is not None and tag not in names:
            raise UsageError(f"tag {tag!r} does not occur; there are {_listed(names)}")

        return profile.narrowed(phase, tag)

    def narrowed(self, phase: str | None, tag: str | None) -> Profile:
        """Like ``select``; of a phase or a tag that does not occur there is nothing."""
        if phase is None and tag is None:
            return self

        def wanted(key: Key) -> bool:
            return phase in (None, key[0]) and tag in (None, tables.tag_name(key[1]))

        return replace(
            self,
            totals=self.totals.only(wanted),
            phase=phase or self.phase,
            tag=tag or self.tag,
        )

    def _between(self, between: tuple[float, float], executor: Executor | None) -> Profile:
        if self.files is None:
            raise UsageError("a profile made in memory has no windows to select from")
        if self.between is not None:
            between = (max(between[0], self.between[0]), min(between[1], self.between[1]))
        parts = self.files.parts("part")
        totals = fold(parts, self.info, between=between, executor=executor)
        kept = set(self.totals.keys)
        return replace(self, totals=totals.only(kept.__contains__), between=between)

    # -- tables

    def layers(self, *, breakdown: bool = False) -> pd.DataFrame:
        """One row a MoE layer with all ratios; columns as in ``docs/csv.md``.

        Over several ranks ``steps`` are passes of all of them: data-parallel ranks step
        separately. The imbalance of a step is that of the rank's own tokens, also where experts
        are spread over ranks and see those of all; ``imbalance_ratio`` is of the sum.

        Args:
            breakdown: rows for each phase and each tag as well as for all of them.
        """
        # A copy each: the finding of one must not be the edit of another.
        return tables.layers_table(self, breakdown=True) if breakdown else self._layers.copy()

    @cached_property
    def _layers(self) -> pd.DataFrame:
        return tables.layers_table(self, breakdown=False)

    def experts(self, *, breakdown: bool = False) -> pd.DataFrame:
        """One row for each layer and expert."""
        return tables.experts_table(self, breakdown=breakdown)

    def overflow(
        self, factors: Sequence[float] | None = None, *, breakdown: bool = False
    ) -> pd.DataFrame:
        """What would overflow at each capacity factor, one row for each layer and factor.

        Args:
            factors: any factors for a recording of level steps; at level windows those that
                were recorded, which are also the default.

        Raises:
            LevelRequiredError: a factor that only step counts can answer.
        """
        return tables.overflow_table(self, factors, breakdown=breakdown)

    def windows(self) -> pd.DataFrame:
        """The timeline: one row for each window, phase, tag and layer."""
        return timetables.windows_table(self)

    def gemm(self) -> pd.DataFrame:
        """Tokens per expert and step: one row a layer, cells by size, share of small GEMMs."""
        return timetables.gemm_table(self)

    def steps(self) -> pd.DataFrame:
        """One row for each step and layer (level steps)."""
        return timetables.steps_table(self)

    def step_counts(self) -> StepTable:
        """Counts of every step as arrays (level steps)."""
        return self._steps

    @cached_property
    def _steps(self) -> StepTable:
        return read_steps(self._detail("steps"), self)

    @cached_property
    def step_keys(self) -> NDArray[np.int64]:
        """For each entry of ``step_counts``, its number in ``totals.keys``."""
        numbers = {key: number for number, key in enumerate(self.totals.keys)}
        keys = zip(self._steps.phase, self._steps.tag, strict=True)
        return np.array([numbers.get(key, -1) for key in keys], dtype=np.int64)

    def tokens(self, layer: int, *, request: str | None = None) -> TokenTable:
        """Expert ids of every token of a layer, in the order in which they ran (level tokens).

        Like all tables, of the phase, the tag and the time that are selected. A token whose step
        is not in ``step_counts`` belongs to no selection, only to the whole.

        Of the ids only those row groups are read that may hold some of these; the profile keeps
        them, up to 1 GiB. The first call reads the request and position of all tokens.

        Args:
            request: the only one that is wanted, by its name in ``requests``.

        Raises:
            LevelRequiredError: the recording has no tokens.
            UsageError: there is no such MoE layer, or the name is none of a request.
        """
        self._detail("tokens")
        wanted = None if request is None else ranks_of_request(self, request)
        return layer_tokens(self._token_parts, self, self.layer(layer), wanted)

    @cached_property
    def _token_parts(self) -> TokenParts:
        return TokenParts(self._detail("tokens"))

    def requests(self) -> pd.DataFrame:
        """What each request did, one row a request (level tokens).

        Of a selection, the requests that have tokens in it, and of them those tokens.

        Raises:
            LevelRequiredError: the recording has no tokens.
        """
        self._detail("tokens")
        return requests_table(self)

    def affinity(self) -> pd.DataFrame:
        """Experts that serve the same tokens, one row a layer, expert and partner (level tokens).

        Raises:
            LevelRequiredError: the recording has no tokens.
        """
        self._detail("tokens")
        return affinity_table(self)

    def transitions(self) -> pd.DataFrame:
        """Where an expert's tokens go in the next layer, one row a pair of experts (level tokens).

        Raises:
            LevelRequiredError: the recording has no tokens.
        """
        self._detail("tokens")
        return transition_table(self)

    def repetition(self) -> pd.DataFrame:
        """How often a request's next token keeps an expert, one row a layer (level tokens).

        Raises:
            LevelRequiredError: the recording has no tokens.
        """
        self._detail("tokens")
        return repetition_table(self)

    def rank_loads(self, ranks: int | None = None) -> pd.DataFrame:
        """Load of expert-parallel ranks: one row a placement, layer and rank.

        Placements are ``contiguous`` (neighbours together), ``striped`` (expert i on rank i mod
        ranks), and ``recorded`` where the recording has one. Replicas share a load evenly.

        Args:
            ranks: how many; unset, those that the recording tells of, else 8 or fewer.
        """
        return rank_loads_table(self, ranks)

    def ranks(self) -> pd.DataFrame:
        """One row for each rank, also those that own no tokens: role, state, what it counted.

        ``steps`` and ``tokens`` are of the layer with the most, ``assignments`` of all layers,
        ``problems`` the number of different ones. ``rank`` counts in its own ``run``; in tables
        of steps and tokens, rank r of run n is ``n * 100_000 + r``.
        """
        return ranks_table(self)

    def layer(self, index: int) -> Layer:
        """The MoE layer with that index.

        Raises:
            UsageError: there is none.
        """
        for layer in self.info.layers:
            if layer.index == index and layer.kind == "moe":
                return layer
        known = [layer.index for layer in self.info.layers if layer.kind == "moe"]
        raise UsageError(f"layer {index} is not a MoE layer; there are {_listed(known)}")

    def has(self, level: str) -> bool:
        """Whether the recording says what that level says.

        It was made at that level or a more detailed one; of tokens whose batches nobody knows
        there are no steps.
        """
        return self._holds(level) and (level != "steps" or self.info.batches)

    def _holds(self, level: str) -> bool:
        return LEVELS.index(self.info.level) >= LEVELS.index(level)

    def need_batches(self) -> None:
        """Nothing, where steps are those of the engine.

        Raises:
            NotKnownError: a file was converted that does not say which tokens ran together.
        """
        if not self.info.batches:
            raise NotKnownError(
                f"which tokens ran together is not in the {self.info.source} file: record the "
                "engine itself, with level='steps'"
            )

    def _detail(self, level: str) -> RecordingFiles:
        if not self._holds(level) or self.files is None:
            raise LevelRequiredError(
                f"this needs a recording of level {level}, this one has {self.info.level}; "
                f"record with level={level!r}"
            )
        return self.files

    # -- figures, for notebooks

    def figure(self, view: str, panel: str | None = None, **state: Any) -> go.Figure:
        """A figure of the dashboard as a plotly figure, which a notebook shows.

        Args:
            view: address of the view, such as ``"overflow"``.
            panel: name of the figure there; the first if None.
            state: what to show, such as ``layer=3``, ``order="load"`` or ``scheme="dark"``.

        Raises:
            UsageError: there is no such view, panel or choice.
        """
        from routeprof.dashboards.preview import figure

        return figure(self, view, panel, **state)

    def heatmap(self, **state: Any) -> go.Figure:
        """Experts by layer; arguments as of ``figure``."""
        return self.figure("heatmap", **state)

    def imbalance(self, **state: Any) -> go.Figure:
        """Imbalance by layer; arguments as of ``figure``."""
        return self.figure("overview", **state)

    def timeline(self, **state: Any) -> go.Figure:
        """Imbalance over time; arguments as of ``figure``."""
        return self.figure("timeline", **state)

    # -- reports

    def findings(self, now: float | None = None) -> list[Finding]:
        """What the reader must know, the gravest first.

        Args:
            now: the time, to tell a live recording from one whose process was killed.
        """
        return findings(self, now)

    def write_csv(self, directory: str | Path, *, ranks: int | None = None) -> list[Path]:
        """Write the CSV reports; returns the files.

        Args:
            ranks: as for ``rank_loads``.
        """
        from routeprof.report.csv import write_csv

        return write_csv(self, Path(directory), ranks=ranks)


def _state(layer: Layer, calls: int, steps: int) -> State:
    if layer.kind == "dense":
        return "dense"
    if layer.unsupported:
        return "unsupported"
    if calls:
        return "captured"
    return "silent" if steps and layer.sees_all_tokens else "idle"


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(str(value) for value in values) or "none"
