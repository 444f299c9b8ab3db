"""What `examine` is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from routeprof.compare.stretches import Stretches, stretches
from routeprof.diagnose.finding import Finding
from routeprof.diagnose.thresholds import DEFAULTS, Thresholds
from routeprof.metrics._arrays import FloatArray
from routeprof.rank_loads import usual_ranks
from routeprof.recording.fold import Key

if TYPE_CHECKING:
    from routeprof.profile import Profile


@dataclass(frozen=True)
class Question:
    """What rules look at.

    Attributes:
        profile: what is selected of a recording.
        limits: where a figure becomes a finding.
        since: another recording of the model, an earlier one, with the same selection.
        gpus: expert-parallel ranks to judge; None for those that the recording tells of.
        hardware: name of a GPU whose peak rates a model of time may use; None for no such model.
        now: seconds since the epoch, as for `findings`.
        model: a configuration, and what to call it, instead of the recording's own.
    """

    profile: Profile
    limits: Thresholds = DEFAULTS
    since: Profile | None = None
    gpus: int | None = None
    hardware: str | None = None
    now: float | None = None
    model: tuple[dict[str, Any], str] | None = None

    @cached_property
    def ranks(self) -> int | None:
        """Expert-parallel ranks, as asked or as recorded; None where neither says."""
        if self.gpus is not None:
            return self.gpus
        ranks, recorded = usual_ranks(self.profile)
        return ranks if recorded else None

    @cached_property
    def stretches(self) -> Stretches:
        """Of the profile."""
        return stretches(self.profile)

    def loads(self, position: int) -> dict[Key, FloatArray]:
        """For each key that has some, the assignments of a layer's experts, ``[experts]``.

        Args:
            position: of the layer in ``info.layers``.
        """
        experts = self.profile.info.layers[position].experts
        counts = self.profile.totals.lists["counts"][:, position, :experts].astype(np.float64)
        pairs = zip(self.profile.totals.keys, counts, strict=True)
        return {key: own for key, own in pairs if own.sum()}


@dataclass(frozen=True)
class Answer:
    """Findings, the gravest first.

    Attributes:
        unjudged: for each rule that could not be judged, by the code of its finding, why.
    """

    findings: list[Finding]
    unjudged: dict[str, str] = field(default_factory=dict)


Rule = Callable[[Question], list[Finding] | str]
"""What is found; or why it cannot be judged, and what would be needed."""
