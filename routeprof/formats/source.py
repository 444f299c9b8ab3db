"""What a reader of another tool's file hands over: layers, and steps or sums.

A reader leaves out what its file does not say: a layer that is absent from a step was not captured,
``None`` is not known, and the phase is ``unknown``. Nothing is made up on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from routeprof.metrics._arrays import IntArray
from routeprof.topology import Layer, ModelInfo, RankRole


@dataclass(frozen=True)
class Step:
    """One pass of the model on one rank; at level windows, a sum over an unknown number of them.

    Attributes:
        counts: by a layer's index its assignments, int64 [experts]. At level tokens it may be
            empty: ``ids`` say it.
        tokens: rows that were routed; None where that is not known.
        invalid: by a layer's index, ids outside the valid range; at level tokens ``ids`` say it.
        time: when the step ended, seconds since the epoch; None where that is not known.
        ids: by a layer's index, int64 [tokens, top_k], each token's experts; -1 is an id outside
            the valid range.
        request, position: int64 [tokens], at level tokens where the file knows them.
    """

    counts: Mapping[int, IntArray] = field(default_factory=dict)
    rank: int = 0
    phase: str = "unknown"
    tag: str | None = None
    tokens: int | None = None
    invalid: Mapping[int, int] = field(default_factory=dict)
    time: float | None = None
    ids: Mapping[int, IntArray] = field(default_factory=dict)
    request: IntArray | None = None
    position: IntArray | None = None


@dataclass(frozen=True)
class Source:
    """A file, or several of one run.

    Attributes:
        tool: who wrote it, as in ``routeprof.formats.FORMATS``.
        layers: of the model, by index; top_k is None where the file does not say it.
        steps: in the order in which they ran, as far as the file knows it; read once.
        level: ``windows`` where ``steps`` are sums.
        roles: part of each rank; unset, rank 0 of 1.
        notes: what a reader of the numbers must know, a sentence each.
        batches: False where a step is a piece of a request, and with what else it ran is not known.
    """

    tool: str
    layers: tuple[Layer, ...]
    steps: Iterable[Step]
    level: Literal["windows", "steps", "tokens"]
    model: ModelInfo = field(default_factory=ModelInfo)
    roles: Mapping[int, RankRole] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    batches: bool = True


@dataclass(frozen=True)
class Told:
    """What the user says of a file that the file does not; what it does say stands.

    Attributes:
        top_k: experts of a token in every MoE layer.
        phase, tag: of steps without one.
        layers: of the model, dense ones too.
        experts: of every MoE layer, the ones that no token chose too.
    """

    top_k: int | None = None
    phase: str | None = None
    tag: str | None = None
    layers: int | None = None
    experts: int | None = None
