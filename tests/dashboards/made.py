"""A recording made up number by number, with every state that a layer can be in."""

from __future__ import annotations

from pathlib import Path
from time import time
from typing import Any

import numpy as np

from routeprof.metrics.gemm import gemm_bucket
from routeprof.metrics.quantiles import histogram_bin
from routeprof.recording.schema import WINDOW_SCHEMA, RankState, RecordingInfo
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import Layer, ModelInfo, RankRole

EXPERTS, TOP_K, STEPS = 16, 2, 4
FACTORS = (1.0, 1.25, 2.0)
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><b>bold</b>"
LONG = "long-" * 38 + "end"


def moe(index: int, **changes: Any) -> Layer:
    """A MoE layer."""
    values: dict[str, Any] = {"router": "softmax", "gate": "logits", "name": f"layers.{index}.mlp"}
    return Layer(index, experts=EXPERTS, top_k=TOP_K, **(values | changes))


LAYERS = (
    Layer(0, "layers.0.mlp", kind="dense"),
    moe(1),
    moe(2, name=f"{HOSTILE}.{LONG}"),
    moe(3),  # silent
    moe(4, unsupported=f"no router found in {HOSTILE}"),
    moe(5, sees_all_tokens=False),  # idle
    moe(6),
)
CAPTURED = (1, 2, 6)


class Writer:
    """Writes windows of one rank, as a recorder would."""

    def __init__(self, path: Path, rank: int = 0, world: int = 1, **changes: Any) -> None:
        self.path = path
        values: dict[str, Any] = {
            "id": "made-up",
            "layers": LAYERS,
            "passes": ("",) * len(LAYERS),
            "model": ModelInfo(name=f"model {HOSTILE}", engine="torch", hidden_size=64),
            "capacity_factors": FACTORS,
            "started": time(),
        }
        info = RecordingInfo(**(values | changes))
        state = RankState(role=RankRole(rank=rank, world_size=world), started=time())
        state.flush_seconds = 1.0
        self.rank, self.window = rank, 0
        self.writer = RecordingWriter(path, info, state)
        self.random = np.random.default_rng(rank)

    def write(self, phase: str = "prefill", tag: str | None = None, tokens: int = 64) -> None:
        """One window in which every layer ran that can."""
        rows = [
            self._row(layer, phase, tag, tokens) for layer in LAYERS if layer.index in (1, 2, 3, 6)
        ]
        columns = {name: [row.get(name) for row in rows] for name in WINDOW_SCHEMA.names}
        self.writer.write("part", WINDOW_SCHEMA, columns)
        self.writer.write_state(cost_seconds=0.01 * (self.window + 1), busy_seconds=1.0)
        self.window += 1

    def stop(self, **changes: Any) -> None:
        """End the recording."""
        self.writer.write_state(state="stopped", **changes)

    def _row(self, layer: Layer, phase: str, tag: str | None, tokens: int) -> dict[str, Any]:
        start = self.writer.info.started + self.window
        row: dict[str, Any] = {
            "window": self.window,
            "start": start,
            "end": start + 1.0,
            "rank": self.rank,
            "layer": layer.index,
            "phase": phase,
            "tag": tag,
            "steps": STEPS,
            "expected_tokens": STEPS * tokens,
            "cost_seconds": 0.001,
            "calls": 0,
        }
        return row if layer.index not in CAPTURED else row | self._counted(layer, tokens)

    def _counted(self, layer: Layer, tokens: int) -> dict[str, Any]:
        skew = np.arange(EXPERTS, 0, -1.0) ** (layer.index / 3)
        steps = self.random.multinomial(tokens * TOP_K, skew / skew.sum(), size=STEPS)
        steps[:, -1] += steps[:, -2]
        steps[:, -2] = 0  # a dead expert
        ratios = steps.max(1) * EXPERTS / (tokens * TOP_K)
        slots = np.ceil(np.array(FACTORS) * tokens * TOP_K / EXPERTS).astype(int)
        over = np.maximum(steps[:, :, None] - slots, 0).sum(1)
        return {
            "calls": STEPS,
            "tokens": STEPS * tokens,
            "counts": steps.sum(0),
            "invalid": 0,
            "max_load_sum": int(steps.max(1).sum()),
            "imbalance_histogram": np.bincount(histogram_bin(ratios), [tokens] * STEPS).astype(int),
            "imbalance_max": float(ratios.max()),
            "gemm_histogram": np.bincount(np.asarray(gemm_bucket(steps)).ravel()),
            "overflow": over.sum(0),
            "overflow_steps": (over > 0).sum(0),
            "capacity_slots": STEPS * EXPERTS * slots,
            "gate_rows": STEPS * tokens,
            "probability_mass": STEPS * tokens * skew / skew.sum(),
            "weight_sum": steps.sum(0) * 0.5,
            "entropy_sum": 2.0 * STEPS * tokens,
            "top1_sum": 0.4 * STEPS * tokens,
            "margin_sum": 0.1 * STEPS * tokens,
            "z_sum": 1.0 * STEPS * tokens,
        }
