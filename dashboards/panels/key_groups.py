"""Counts by phase or by tag: sums of a profile's keys, without a table for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.dashboards import formats
from routeprof.dashboards.view import Context
from routeprof.recording.fold import Key, Totals
from routeprof.tables import tag_name

NO_TAGS = 'Nothing was tagged. Tag what runs: with recording.tag("code"):'


def by_phase(context: Context) -> tuple[list[str], NDArray[np.int64]]:
    """Phases of the selected tag and time, and their counts: int64 [phases, layers, experts]."""
    tag, profile = context.state.tag, context.all_tags
    names, counts = _summed(
        profile.totals, lambda key: key[0], lambda key: tag in (None, tag_of(key))
    )
    order = sorted(range(len(names)), key=lambda place: profile.phases.index(names[place]))
    return [names[place] for place in order], counts[order]


def by_tag(context: Context) -> tuple[list[str], NDArray[np.int64]]:
    """Tags of the selected phase and time, and their counts: int64 [tags, layers, experts]."""
    phase = context.state.phase
    return _summed(context.all_tags.totals, tag_of, lambda key: phase in (None, key[0]))


def load_over_mean(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Counts [..., experts] ÷ their mean; NaN without tokens."""
    mean = counts.mean(axis=-1, keepdims=True)
    return np.asarray(counts / np.where(mean > 0, mean, np.nan))


def tag_of(key: Key) -> str:
    """The name of a key's tag."""
    return tag_name(key[1])


def phase_and_time(context: Context) -> str:
    """The selection without its tag, in words."""
    between = context.state.between
    phase = context.state.phase or "all phases"
    return f"{phase}, {formats.time_range(*between)}" if between else phase


def tag_and_time(context: Context) -> str:
    """The selection without its phase, in words."""
    between = context.state.between
    tag = f"tag {context.state.tag}" if context.state.tag else "all tags"
    return f"{tag}, {formats.time_range(*between)}" if between else tag


def phase_and_tag(context: Context) -> str:
    """The selection without its time, in words."""
    tag = f"tag {context.state.tag}" if context.state.tag else "all tags"
    return f"{context.state.phase or 'all phases'}, {tag}"


def is_selected(context: Context) -> Callable[[Key], bool]:
    """Whether a phase and tag are the selected ones."""
    state = context.state
    return lambda key: state.phase in (None, key[0]) and state.tag in (None, tag_of(key))


def _summed(
    totals: Totals, group: Callable[[Key], str], wanted: Callable[[Key], bool]
) -> tuple[list[str], NDArray[np.int64]]:
    numbers = [number for number, key in enumerate(totals.keys) if wanted(key)]
    names = list(dict.fromkeys(group(totals.keys[number]) for number in numbers))
    places = [names.index(group(totals.keys[number])) for number in numbers]
    lists: NDArray[Any] = totals.lists["counts"]
    counts = np.zeros((len(names), *lists.shape[1:]), dtype=np.int64)
    np.add.at(counts, np.array(places, dtype=np.int64), lists[numbers])
    return names, counts
