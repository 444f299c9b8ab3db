"""SGLang's records of single passes: per_pass and per_token, of one rank or of several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError
from routeprof.formats.opening import MOST_CELLS, whole_counts
from routeprof.formats.source import Source, Step
from routeprof.metrics._arrays import IntArray
from routeprof.topology import Layer, ModelInfo, RankRole

ENGINE = ModelInfo(engine="sglang")
MODES = {1: "prefill", 2: "decode", 3: "mixed", 5: "verify"}
"""Phases by ``forward_mode``, an ``IntEnum`` of SGLang; 4 is a pass without tokens."""

REPEATED = (
    "ranks that see the same tokens are each counted, and the file does not say how many did: "
    "totals may be a multiple of what was routed, shares are right"
)
MAPPED = (
    "slots were turned into experts by the map that was in force when the file was written: wrong "
    "for passes before the last rebalancing"
)

Record = dict[str, Any]


class Dump:
    """One rank's records.

    Attributes:
        experts: int64 [layers, slots], the expert in each slot.
        records: one for each pass.
    """

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        self.path = path
        try:
            self.experts = _tensor(found["last_physical_to_logical_map"]).astype(np.int64)
            self.records: list[dict[str, Any]] = [dict(one) for one in found["records"]]
            self.ranks = {int(one["rank"]) for one in self.records}
            for record in self.records:
                record["number"] = int(record["forward_pass_id"])
                record["phase"] = MODES.get(int(record.get("forward_mode", 0)), "unknown")
                record["counts"] = self._counts(_tensor(record["global_physical_count"]))
                self._check(record.get("topk_ids_of_layer"))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UsageError(f"{path} lacks what SGLang records ({error!r})"[:300]) from None
        self.detailed = all(one.get("topk_ids_of_layer") is not None for one in self.records)

    def _counts(self, slots: Any) -> IntArray:
        """Counts by expert, int64 [layers, experts], of counts by slot."""
        counts = whole_counts(slots, str(self.path))
        if counts.shape != self.experts.shape or counts.ndim != 2:
            raise ValueError(f"counts of shape {counts.shape} for slots {self.experts.shape}")
        experts = int(self.experts.max()) + 1
        if self.experts.min() < 0 or experts * len(counts) > MOST_CELLS:
            raise ValueError("a map of slots that cannot be")
        by_expert = np.zeros((len(counts), experts), dtype=np.int64)
        np.add.at(by_expert, (np.arange(len(counts))[:, None], self.experts), counts)
        return by_expert

    def _check(self, slots: Any) -> None:
        if slots is not None and (_tensor(slots).ndim != 3 or len(slots) != len(self.experts)):
            raise ValueError(f"ids of shape {slots.shape}")

    def ids(self, record: dict[str, Any]) -> IntArray:
        """Experts of each token, int64 [layers, tokens, width]; -1 where there is none."""
        slots = record["topk_ids_of_layer"].astype(np.int64)
        known = (slots >= 0) & (slots < self.experts.shape[1])
        layer = np.arange(len(slots))[:, None, None]
        return np.where(known, self.experts[layer, np.where(known, slots, 0)], -1)


def of_passes(dumps: list[Dump]) -> Source:
    """Passes in their order, with the counts of all ranks."""
    ranks = [rank for dump in dumps for rank in dump.ranks]
    if len(set(ranks)) < len(ranks):
        raise UsageError(f"{dumps[-1].path} is of a rank that another file has: pass each once")
    passes: dict[int, list[tuple[Dump, dict[str, Any]]]] = {}
    for dump in dumps:
        for record in dump.records:
            passes.setdefault(record["number"], []).append((dump, record))
    shapes = {record["counts"].shape for own in passes.values() for _, record in own}
    if len(shapes) != 1:
        raise UsageError(f"{dumps[0].path} and others are of different models, or hold no pass")
    notes = [MAPPED] if any(_moved(dump.experts) for dump in dumps) else []
    missing = sum(len(own) < len(ranks) for own in passes.values())
    if unnamed := sorted(set(range(max(ranks, default=0))) - set(ranks)):
        notes.append(f"ranks {', '.join(map(str, unnamed))} have no file here: theirs is missing")
    if missing:
        notes.append(f"{missing} of {len(passes)} passes lack a rank's record")
    if len(ranks) > 1:
        notes.append(REPEATED)
    ((layers, experts),) = shapes
    routed = np.sum([record["counts"] for own in passes.values() for _, record in own], axis=0)
    kept = [index for index, row in enumerate(routed) if row.any()]
    if not kept:
        raise UsageError(f"{dumps[0].path} counts nothing at all: pass one with counts")
    top_k = _top_k(dumps, kept)
    found = tuple(
        Layer(index, f"layer {index}", experts=experts, top_k=top_k)
        if index in kept
        else Layer(index, f"layer {index}", kind="dense")
        for index in range(layers)
    )
    if top_k is None:
        return Source("sglang", found, _sums(passes, kept), "steps", ENGINE, notes=tuple(notes))
    roles = {rank: RankRole(rank, len(ranks)) for rank in ranks}
    steps = _tokens(passes, kept, top_k)
    return Source("sglang", found, steps, "tokens", ENGINE, roles, tuple(notes))


def _moved(experts: IntArray) -> bool:
    """Whether slots are anything but the experts in order."""
    return not np.array_equal(experts, np.broadcast_to(np.arange(experts.shape[1]), experts.shape))


def _top_k(dumps: list[Dump], kept: list[int]) -> int | None:
    """Experts of a token, where the tables of ids are whole; else None.

    Tables have room for 8: where the counts of a pass are of more, ids are missing.
    """
    widest = 0
    for dump in dumps:
        for record in dump.records if dump.detailed else ():
            ids = dump.ids(record)[kept]
            if not np.array_equal((ids >= 0).sum(axis=(1, 2)), record["counts"][kept].sum(axis=1)):
                return None
            widest = max(widest, int((ids >= 0).sum(axis=2).max(initial=0)))
    return widest if all(dump.detailed for dump in dumps) and widest else None


def _sums(passes: dict[int, list[tuple[Dump, Record]]], kept: list[int]) -> Iterator[Step]:
    """A step for each pass: ranks hold parts of its counts."""
    for number in sorted(passes):
        counts = np.sum([record["counts"] for _, record in passes[number]], axis=0)
        if counts.any():
            phases = {record["phase"] for _, record in passes[number]}
            phase = phases.pop() if len(phases) == 1 else "unknown"
            yield Step({index: counts[index] for index in kept}, phase=phase)


def _tokens(
    passes: dict[int, list[tuple[Dump, Record]]], kept: list[int], top_k: int
) -> Iterator[Step]:
    """A step for each pass and rank. Rows without a single expert are padding."""
    for number in sorted(passes):
        for dump, record in passes[number]:
            ids = dump.ids(record)[kept]
            real = (ids >= 0).any(axis=(0, 2))
            if real.any():
                rows = _first_valid(ids[:, real])[:, :, :top_k]
                own = dict(zip(kept, rows, strict=True))
                yield Step(ids=own, rank=int(record["rank"]), phase=record["phase"])


def _tensor(value: Any) -> NDArray[Any]:
    """A tensor of numbers; a list may be one that repeats itself without end."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise TypeError(f"a {type(value).__name__} where a tensor of whole numbers belongs")
    return value


def _first_valid(ids: IntArray) -> IntArray:
    """Choices in their order, and what is none behind them."""
    order = np.argsort(ids < 0, axis=2, kind="stable")
    return np.take_along_axis(ids, order, axis=2)
