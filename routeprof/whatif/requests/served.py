"""Requests with the routing that was recorded of them: what batches are composed of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from routeprof.errors import UsageError
from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.requests import replica_ranks, request_names
from routeprof.tables import tag_name
from routeprof.token_parts import last_places, of_rank
from routeprof.topology import Layer
from routeprof.whatif.evidence import require_tokens

if TYPE_CHECKING:
    from routeprof.profile import Profile

PHASES = ("decode", "prefill")


@dataclass(frozen=True)
class LayerTokens:
    """What a layer did with the requests' tokens.

    Attributes:
        request: [tokens], the place of the token's request in ``Requests``.
        turn: [tokens], in which of its request's steps it runs, from 0.
        ids: [tokens, k], -1 for an id outside the layer's range.
        prefill: assignments in the recorded prefill, [requests, experts]; all 0 where not known.
    """

    layer: Layer
    request: IntArray
    turn: IntArray
    ids: IntArray
    prefill: IntArray


@dataclass(frozen=True)
class Requests:
    """Requests in the order of arrival, all of whose tokens of a phase are known.

    Attributes:
        phase: ``decode``: a request takes a step for each position; ``prefill``: one for all.
        names: as in the table of requests.
        classes: the tag that each first ran under, or ``untagged``.
        tokens: [requests], in the phase.
        layers: the layers that know whose their tokens are.
        left_out: requests of whom some layer lacks tokens of the phase, or has some twice.
        blind: indices of layers with tokens that do not know whose they are.
    """

    phase: str
    names: tuple[str, ...]
    classes: tuple[str, ...]
    tokens: IntArray
    layers: tuple[LayerTokens, ...]
    left_out: int = 0
    blind: tuple[int, ...] = ()

    @property
    def turns(self) -> IntArray:
        """Steps that each request takes, [requests]."""
        return self.tokens if self.phase == "decode" else np.ones_like(self.tokens)


def served_requests(profile: Profile, phase: str) -> Requests:
    """The requests of a profile with their tokens of a phase.

    Args:
        profile: of level tokens; a tag and a time may be selected, a phase must not be.
        phase: one of ``PHASES``.

    Raises:
        LevelRequiredError: the recording has no tokens.
        UsageError: another phase, one that does not occur, or no request of which all is known.
    """
    if phase not in PHASES:
        raise UsageError(f"phase {phase!r} is not one of {', '.join(PHASES)}: batches are of one")
    require_tokens(profile)
    profile.select(phase=phase)
    replicas = replica_ranks(profile)
    seen = [
        _seen(profile, profile.layer(index), phase, replicas) for index in profile.layer_indices
    ]
    blind = tuple(one.layer.index for one in seen if not len(one.numbers) and one.unknown)
    seen = [one for one in seen if len(one.numbers)]
    numbers = _whole(seen)
    if not len(numbers):
        raise UsageError(
            f"no request has its {phase} tokens known in every layer: record with level='tokens' "
            "and from the start of the requests"
        )
    arrival, tags = _first(seen, numbers)
    order = np.lexsort((numbers, arrival))
    numbers = numbers[order]
    return Requests(
        phase=phase,
        names=tuple(request_names(numbers, with_rank=len(set(replicas.values())) > 1)),
        classes=tuple(tags[place] for place in order),
        tokens=seen[0].extent[np.searchsorted(seen[0].numbers, numbers), 0],
        layers=tuple(_layer_tokens(one, numbers, phase) for one in seen),
        left_out=len(reduce(np.union1d, [one.numbers for one in seen])) - len(numbers),
        blind=blind,
    )


@dataclass(frozen=True)
class _Seen:
    """Tokens of a layer, of the phase and of the prefill.

    Attributes:
        number: [tokens], the request's number; ``position`` the token's; ``ids`` [tokens, k].
        prefill_number, prefill_ids: the same of the prefill.
        numbers: requests with tokens of the phase, ascending; ``extent`` [requests, 3] their
            tokens, first and last position; ``time`` and ``tag`` of the first step.
        unknown: whether there are tokens of the phase that are nobody's.
    """

    layer: Layer
    number: IntArray
    position: IntArray
    ids: IntArray
    prefill_number: IntArray
    prefill_ids: IntArray
    numbers: IntArray
    extent: IntArray
    time: FloatArray
    tag: tuple[str, ...]
    unknown: bool


def _seen(profile: Profile, layer: Layer, phase: str, replicas: dict[int, int]) -> _Seen:
    table, steps = profile.tokens(layer.index), profile.step_counts()
    mine = np.flatnonzero(steps.layer == layer.index)
    ran = of_rank(steps.rank[mine], steps.step[mine])
    place = last_places(ran, of_rank(table.rank, table.step))  # -1: of a step that is not known
    rank = table.rank.copy()
    for own, first in replicas.items():
        rank[table.rank == own] = first
    number = of_rank(rank, table.request)
    known = (table.request >= 0) & (place >= 0)
    of_phase, of_prefill = (
        np.append(steps.phase[mine] == name, False)[place] for name in (phase, "prefill")
    )
    ids = np.where(table.ids < layer.experts, table.ids, -1).astype(np.int32)
    wanted, before = known & of_phase, known & of_prefill
    numbers, first_step = _first_steps(number[known], table.position[known], place[known])
    served, extent = _extents(number[wanted], table.position[wanted])
    began = mine[first_step[np.searchsorted(numbers, served)]]
    return _Seen(
        layer,
        number[wanted],
        table.position[wanted],
        ids[wanted],
        number[before],
        ids[before],
        served,
        extent,
        steps.time[began],
        tuple(tag_name(tag) for tag in steps.tag[began]),
        bool((of_phase & ~known).any()),
    )


def _extents(number: IntArray, position: IntArray) -> tuple[IntArray, IntArray]:
    """Requests, ascending, and of each the number of its tokens, first and last position."""
    numbers, inverse, count = np.unique(number, return_inverse=True, return_counts=True)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.full(len(numbers), -1)
    np.minimum.at(first, inverse, position)
    np.maximum.at(last, inverse, position)
    return numbers, np.stack((count, first, last), axis=1)


def _first_steps(
    number: IntArray, position: IntArray, place: IntArray
) -> tuple[IntArray, IntArray]:
    """Requests, ascending, and the place of the step in which each has its first position."""
    order = np.lexsort((position, number))
    numbers, first = np.unique(number[order], return_index=True)
    return numbers, place[order][first]


def _whole(seen: Sequence[_Seen]) -> IntArray:
    """Requests that have the same positions in every layer, each once and without a gap."""
    if not seen:
        return np.zeros(0, dtype=np.int64)
    common = reduce(np.intersect1d, [one.numbers for one in seen])
    extents = np.stack([one.extent[np.searchsorted(one.numbers, common)] for one in seen])
    count, lowest, highest = extents[0].T
    same = (extents == extents[0]).all(axis=(0, 2))
    return np.asarray(common[same & (highest - lowest + 1 == count)])


def _first(seen: Sequence[_Seen], numbers: IntArray) -> tuple[FloatArray, tuple[str, ...]]:
    """When each request began, and its tag."""
    place = np.searchsorted(seen[0].numbers, numbers)
    return seen[0].time[place], tuple(seen[0].tag[one] for one in place)


def _layer_tokens(one: _Seen, numbers: IntArray, phase: str) -> LayerTokens:
    """The layer's tokens of some requests, by their place in ``numbers``."""
    request = last_places(numbers, one.number)
    kept = request >= 0
    request, position = request[kept], one.position[kept]
    first = one.extent[np.searchsorted(one.numbers, numbers), 1]
    turn = position - first[request] if phase == "decode" else np.zeros_like(position)
    before = last_places(numbers, one.prefill_number)
    ids = np.where(before[:, np.newaxis] >= 0, one.prefill_ids, -1)
    prefill = row_loads(before, ids, len(numbers), one.layer.experts)
    return LayerTokens(one.layer, request, turn, one.ids[kept], prefill)


def row_loads(row: IntArray, ids: IntArray, rows: int, experts: int) -> IntArray:
    """Assignments by row and expert, ``[rows, experts]``.

    Args:
        row: of each token, [tokens].
        ids: [tokens, k]; what names no expert is left out.
    """
    valid = (ids >= 0) & (ids < experts)
    cells = (row[:, np.newaxis] * experts + ids)[valid]
    return np.bincount(cells, minlength=rows * experts).reshape(rows, experts)
