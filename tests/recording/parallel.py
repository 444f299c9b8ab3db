"""Recordings of parallel ranks with counts given number by number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil, floor, log2
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from routeprof.profile import Profile
from routeprof.recording.schema import (
    ROW_SCHEMA,
    STEP_SCHEMA,
    TOKEN_SCHEMA,
    WINDOW_SCHEMA,
    RankState,
    RecordingInfo,
)
from routeprof.recording.writer import RecordingWriter
from routeprof.report.csv import available, csv_text
from routeprof.topology import Layer, RankRole
from tests.recording.id_lists import as_bytes

EXPERTS, TOP_K = 4, 2
FACTORS = (1.0, 1.5)
Counts = Mapping[int, Sequence[int]]
"""Assignments of one step by layer: its index, and one number for each expert."""


def moe(index: int, **changes: Any) -> Layer:
    facts = {"experts": EXPERTS, "top_k": TOP_K, "router": "softmax", "gate": "logits"}
    return Layer(index, f"layers.{index}.mlp", **(facts | changes))


LAYERS = (moe(0), moe(1))


class Rank:
    """Writes one rank of a recording; each step is a window of its own.

    Args:
        own: the layers of this rank, where they are not those of ``recording.json``.
        process: what tells the process apart, such as its pid.
        module: the pass of every layer.
    """

    def __init__(
        self,
        directory: Path,
        role: RankRole | None = None,
        *,
        layers: Sequence[Layer] = LAYERS,
        own: Sequence[Layer] = (),
        process: int = 1,
        started: float = 1000.0,
        module: str = "model",
        **info: Any,
    ) -> None:
        facts = {"id": "one", "passes": (module,) * len(layers), "capacity_factors": FACTORS}
        told = RecordingInfo(**(facts | {"layers": tuple(layers), "started": started} | info))
        state = RankState(
            role=role or RankRole(),
            pid=process,
            host="node",
            started=started,
            layers=tuple(own),
            passes=(module,) * len(own),
        )
        self.writer = RecordingWriter(directory, told, state)
        self.layers = {layer.index: layer for layer in own or layers}
        self.start, self.rank, self.done = started, state.role.rank, 0
        self.module = module

    def steps(self, *steps: Counts, phase: str = "decode", tag: str | None = None) -> Rank:
        """Write windows of one step each, and what belongs to the recording's level."""
        for counts in steps:
            rows = [self._window(index, own, phase, tag) for index, own in counts.items()]
            self._write("part", WINDOW_SCHEMA, rows)
            if self.writer.info.level != "windows":
                rows = [self._step(index, own, phase, tag) for index, own in counts.items()]
                self._write("steps", STEP_SCHEMA, rows)
            if self.writer.info.level == "tokens":
                rows = [self._tokens(index, own) for index, own in counts.items()]
                self._write("tokens", TOKEN_SCHEMA, rows)
                self._write("rows", ROW_SCHEMA, [self._rows(next(iter(counts.values())))])
            self.done += 1
        return self

    def stop(self, state: str = "stopped", **changes: Any) -> Rank:
        self.writer.write_state(state=state, **changes)
        return self

    def _write(self, kind: str, schema: Any, rows: list[dict[str, Any]]) -> None:
        columns = {name: [row.get(name) for row in rows] for name in schema.names}
        self.writer.write(kind, schema, columns)

    def _window(self, index: int, counts: Sequence[int], phase: str, tag: str | None) -> dict:
        layer, total = self.layers[index], sum(counts)
        tokens = total // layer.top_k
        ratio = max(counts) * len(counts) / total
        slots = [ceil(factor * total / len(counts)) for factor in self.writer.info.capacity_factors]
        over = [sum(max(0, count - room) for count in counts) for room in slots]
        sizes = [0] * 12
        for count in counts:
            sizes[count.bit_length()] += 1
        return {
            "window": self.done,
            "start": self.start + self.done,
            "end": self.start + self.done + 1,
            "rank": self.rank,
            "layer": index,
            "phase": phase,
            "tag": tag,
            "steps": 1,
            "calls": 1,
            "tokens": tokens,
            "expected_tokens": tokens,
            "counts": counts,
            "invalid": 0,
            "max_load_sum": max(counts),
            "imbalance_histogram": [0] * floor(32 * log2(ratio)) + [tokens],
            "imbalance_max": ratio,
            "gemm_histogram": sizes,
            "overflow": over,
            "overflow_steps": [int(one > 0) for one in over],
            "capacity_slots": [room * len(counts) for room in slots],
            "gate_rows": 0,
            "cost_seconds": 0.25,
        }

    def _step(self, index: int, counts: Sequence[int], phase: str, tag: str | None) -> dict:
        tokens = sum(counts) // self.layers[index].top_k
        facts = {"step": self.done, "time": self.start + self.done + 0.5, "rank": self.rank}
        facts |= {"layer": index, "phase": phase, "tag": tag, "requests": tokens}
        return facts | {"tokens": tokens, "invalid": 0, "counts": counts}

    def _tokens(self, index: int, counts: Sequence[int]) -> dict:
        """Choices dealt out so that no token gets an expert twice, where counts allow."""
        ids = [expert for expert, count in enumerate(counts) for _ in range(count)]
        tokens = len(ids) // TOP_K
        pairs = [expert for token in range(tokens) for expert in ids[token::tokens]]
        return {
            "step": self.done,
            "rank": self.rank,
            "layer": index,
            "tokens": tokens,
            "ids": as_bytes(pairs, EXPERTS),
        }

    def _rows(self, counts: Sequence[int]) -> dict:
        tokens = list(range(sum(counts) // TOP_K))
        position = [self.done] * len(tokens)
        facts = {"step": self.done, "rank": self.rank, "pass": f"{self.module}@cpu"}
        return facts | {"request": tokens, "position": position}


# -- ready-made

# Assignments of a step; the first rank sees A, the second B. All have a sum of 8: 4 tokens.
A = {0: [4, 2, 1, 1], 1: [2, 2, 2, 2]}
B = {0: [0, 0, 4, 4], 1: [1, 1, 2, 4]}
BOTH = [[4, 2, 5, 5], [3, 3, 4, 6]]
"""A + B, by layer."""


STAGES = ((moe(0), moe(1)), (moe(2), moe(3)))


def role(rank: int, world: int, **places) -> RankRole:
    return RankRole(rank, world, **places)


def grid(directory: Path, *, twins: bool = True, **info) -> Path:
    """TP 2 × DP 2, the data-parallel rank outermost."""
    for dp, steps in enumerate(([A, A, B], [B])):
        for tp in range(1 + twins):
            place = role(2 * dp + tp, 4, tp=tp, dp=dp, ep=2 * dp + tp, owns_tokens=tp == 0)
            Rank(directory, place, process=2 * dp + tp, **info).steps(*steps).stop()
    return directory


def pipeline(directory: Path, order=(0, 1), **info) -> Path:
    """PP 2: each stage knows its own layers alone, and the first to come writes recording.json."""
    for pp in order:
        rank = Rank(
            directory, role(pp, 2, pp=pp), layers=STAGES[pp], own=STAGES[pp], process=pp, **info
        )
        rank.steps({2 * pp: A[0], 2 * pp + 1: A[1]}, {2 * pp: B[0], 2 * pp + 1: B[1]}).stop()
    return directory


def nodes(root: Path, *, run: str = "", ids=("x", "y"), **info) -> tuple[Path, Path]:
    """One rank on each of two nodes, which have no file system in common."""
    for number, (step, name) in enumerate(zip((A, B), ids, strict=True)):
        place = role(number, 2, dp=number)
        rank = Rank(root / f"node{number}", place, id=name, run=run, process=number, **info)
        rank.steps(step, step).stop()
    return root / "node0", root / "node1"


def days(root: Path, one=None, other=None, **both) -> tuple[Path, Path]:
    """Two recordings of one model, a day apart."""
    Rank(root / "monday", id="m", **both, **(one or {})).steps(A, A, tag="code").stop()
    facts = {"id": "t", "started": 90_000.0} | both
    Rank(root / "tuesday", **facts, **(other or {})).steps(B, tag="prose").stop()
    return root / "monday", root / "tuesday"


# -- looking at it, and changing it


def codes(profile: Profile) -> dict[str, str]:
    return {finding.code: finding.evidence for finding in profile.findings()}


def tables(profile: Profile) -> dict[str, str]:
    """Every report but the findings; twins, too, say how many ranks the experts are spread over."""
    names = [name for name in available(profile) if name != "findings"]
    return {name: csv_text(profile, name, ranks=2) for name in names}


def column(profile: Profile, name: str) -> list:
    return profile.layers()[name].tolist()


def change(directory: Path, rank: int, **changes) -> None:
    """Change rank.json."""
    file = directory / f"rank-{rank:05d}" / "rank.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit(file: Path, name: str, values: list) -> None:
    """Replace a column of a part."""
    table = pq.read_table(file)
    place = table.column_names.index(name)
    field = table.schema.field(name)
    pq.write_table(table.set_column(place, field, pa.array(values, type=field.type)), file)
