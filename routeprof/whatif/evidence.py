"""What a recording knows of each layer that a capacity could be applied to."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from routeprof.errors import LevelRequiredError, UsageError
from routeprof.metrics.capacity import FACTOR_GRID, parse_factor
from routeprof.metrics.overflow import RoutedSteps
from routeprof.tables import layer_steps, moe_layers
from routeprof.topology import Layer
from routeprof.whatif.outcome import Evidence, Range, Steps, Sums

if TYPE_CHECKING:
    from routeprof.profile import Profile


def evidence(profile: Profile, numbers: list[int]) -> dict[int, Evidence]:
    """For each layer with assignments, by its index: its steps where all were kept, else sums.

    Args:
        numbers: numbers of the keys (phase and tag), see ``tables.groups``.

    Raises:
        LevelRequiredError: there are neither steps nor recorded factors.
    """
    found: dict[int, Evidence] = {}
    for position, layer in moe_layers(profile):
        if not profile.totals.lists["counts"][numbers, position].sum():
            continue
        steps = _steps(profile, numbers, position, layer)
        found[layer.index] = steps or _sums(profile, numbers, position, layer)
    return found


def require_tokens(profile: Profile) -> None:
    """Check that there is something to predict from.

    Raises:
        UsageError: no layer has tokens in the selection.
    """
    if not profile.totals.lists["counts"].sum():
        raise UsageError("the selection has no tokens: record a pass, or select less narrowly")


def token_ranks(profile: Profile) -> int:
    """Ranks of one run that each have tokens of their own in the same layers; at least 1."""
    ranks = profile.files.ranks if profile.files else ()
    stages = Counter(
        (rank.run, rank.state.role.pp if rank.state else 0) for rank in ranks if rank.owns_tokens
    )
    return max(stages.values(), default=1)


def _dropped(profile: Profile, numbers: list[int], position: int, layer: Layer) -> int:
    """Assignments that the model itself dropped; an invalid id of other models is nobody's."""
    return int(profile.totals.sums["invalid"][numbers, position].sum()) if layer.drops else 0


def _steps(profile: Profile, numbers: list[int], position: int, layer: Layer) -> Steps | None:
    if not profile.has("steps") or profile.files is None:
        return None
    steps = layer_steps(profile, numbers, position, layer)
    if not steps.whole or steps.tokens.min(initial=0) < 0:
        return None
    routed = RoutedSteps(steps.counts, steps.tokens, layer.choices)
    return Steps(routed, _dropped(profile, numbers, position, layer))


def _sums(profile: Profile, numbers: list[int], position: int, layer: Layer) -> Sums:
    totals, info = profile.totals, profile.info
    lists = {
        name: totals.lists[name][numbers, position].sum(0)
        for name in (
            "counts",
            "gemm_histogram",
            "imbalance_histogram",
            "overflow",
            "capacity_slots",
        )
    }
    ran = int(lists["gemm_histogram"].sum()) // layer.experts
    if not ran or not info.capacity_factors or info.capacity_rule != "ceil":
        raise LevelRequiredError(
            "the recording has sums alone, and overflow is a matter of single steps; record with "
            "level='windows' or level='steps'"
        )
    enough = _enough(profile, numbers, position, layer)
    factors = [parse_factor(factor) for factor in info.capacity_factors]
    return Sums(
        experts=layer.experts,
        top_k=layer.choices,
        steps=ran,
        tokens=int(totals.sums["tokens"][numbers, position].sum()),
        assignments=int(lists["counts"].sum()),
        cells=int(lists["gemm_histogram"][1:].sum()),
        dropped=_dropped(profile, numbers, position, layer),
        overflow=dict(zip(factors, lists["overflow"].tolist(), strict=False)),
        slots=dict(zip(factors, lists["capacity_slots"].tolist(), strict=False)),
        largest=_largest_step(profile, numbers, position),
        enough=enough,
        spread=tuple(
            (min(2 ** ((place + 1) / info.imbalance_bins_per_octave), float(enough)), tokens)
            for place, tokens in enumerate(lists["imbalance_histogram"].tolist())
            if tokens
        ),
    )


def _enough(profile: Profile, numbers: list[int], position: int, layer: Layer) -> Fraction:
    """The largest max ÷ mean load of any step, rounded up; where the model drops, the experts.

    It is of assignments that were counted: with what was dropped it may have been larger.
    """
    largest = float(np.fmax.reduce(profile.totals.imbalance_max[numbers, position]))
    if np.isnan(largest) or _dropped(profile, numbers, position, layer):
        return Fraction(layer.experts)
    return min(
        Fraction(ceil(Fraction(largest) * FACTOR_GRID), FACTOR_GRID), Fraction(layer.experts)
    )


def _largest_step(profile: Profile, numbers: list[int], position: int) -> Range:
    """Tokens of the largest step: no fewer than a window's mean, no more than a window's sum."""
    windows = profile.totals.windows
    own = (windows.layer == position) & np.isin(windows.key, numbers) & (windows.steps > 0)
    tokens, steps = windows.tokens[own], windows.steps[own]
    return int((-(-tokens // steps)).max(initial=0)), int(tokens.max(initial=0))
