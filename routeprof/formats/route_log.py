"""Logs of a patched vLLM: a line for each row of a logged pass, with its experts.

As ``vllm_moe_routelogging_patch`` writes them: a line ``{"type": "meta", "model_id", "top_k",
"layers_logged", …}``, then ``{"type": "route", "token_idx", "layer", "topk_ids", …}``.
``token_idx`` is the row of a batch, not a position in a sequence, and begins anew with each pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.alike import TAG, all_alike, note_of
from routeprof.formats.documents import documents, mentions
from routeprof.formats.expert_ids import UNSEEN, layers_of, within
from routeprof.formats.opening import one_of
from routeprof.formats.source import Source, Step, Told
from routeprof.metrics._arrays import IntArray
from routeprof.topology import ModelInfo

LOGGED = (
    "requests, positions and phases are not in the file, and it has only passes that were logged"
)
EVERY_60TH = (
    "the patch takes every 60th call of a MoE layer for the layer that it names: in a model with "
    "other than 60 of them, such as Qwen1.5-MoE with 24, its rows are of several layers"
)


def is_route_log(path: Path) -> bool:
    """JSON lines with the experts of rows."""
    return mentions(path, "topk_ids", "token_idx", "type")


def read_route_log(paths: Sequence[Path], told: Told) -> Source:
    """Passes of the engine, as far as they were logged.

    Raises:
        UsageError: a line without its numbers, or rows of different widths.
    """
    path = one_of(paths)
    meta, passes = _read(path)
    if not passes:
        raise UsageError(f"{path} holds no routes: pass a log with lines of type route")
    widths = {ids.shape[1] for ids_of in passes for ids in ids_of.values()}
    if len(widths) != 1:
        raise UsageError(f"{path} has rows of {len(widths)} widths: pass logs of one model apart")
    experts = told.experts or 1 + max(int(ids.max()) for own in passes for ids in own.values())
    top_k = widths.pop()
    indices = {index for own in passes for index in own}
    layers = layers_of(path, dict.fromkeys(indices, top_k), experts, lambda one: f"layer {one}")
    steps = [_step(own, experts) for own in passes]
    notes = (LOGGED, EVERY_60TH, *note_of(steps, experts))
    model = ModelInfo(
        name=str(meta.get("model_id", "")),
        engine="vllm",
        engine_version=str(meta.get("vllm_version", "")),
    )
    return Source(
        "vllm-log",
        layers,
        steps,
        "tokens",
        model,
        notes=notes if told.experts else (*notes, UNSEEN),
    )


def _step(ids_of: dict[int, IntArray], experts: int) -> Step:
    ids = {index: within(ids, experts) for index, ids in ids_of.items()}
    return Step(ids=ids, tag=TAG if all_alike(ids) else None)


def _read(path: Path) -> tuple[dict[str, Any], list[dict[int, IntArray]]]:
    """What the file says of itself, and for each pass the ids [rows, top_k] by layer."""
    meta: dict[str, Any] = {}
    passes: list[dict[int, list[list[int]]]] = []
    for layer, first, ids in _rows(path, meta):
        if first and (not passes or layer in passes[-1]):
            passes.append({})
        if not passes or (not first and layer not in passes[-1]):
            raise UsageError(f"{path} begins a pass in its middle: pass the whole log")
        passes[-1].setdefault(layer, []).append(ids)
    try:
        return meta, [
            {index: np.array(rows, dtype=np.int64) for index, rows in own.items()} for own in passes
        ]
    except (ValueError, OverflowError):
        raise UsageError(f"{path} has rows of several widths: pass another copy") from None


def _rows(path: Path, meta: dict[str, Any]) -> Iterator[tuple[int, bool, list[int]]]:
    """For each route its layer, whether it is the first row of a pass there, and its ids."""
    for where, line in documents(path):
        if line.get("type") == "meta":
            meta |= line
        elif line.get("type") == "route":
            ids, layer, row = (line.get(name) for name in ("topk_ids", "layer", "token_idx"))
            place = [layer, row]
            if not _are_numbers(ids) or not _are_numbers(place) or min(place) < 0:
                raise UsageError(
                    f"{where} lacks layer, token_idx and topk_ids as whole numbers: mend it"
                )
            yield place[0], place[1] == 0, ids


def _are_numbers(ids: Any) -> TypeGuard[list[int]]:
    return isinstance(ids, list) and bool(ids) and all(isinstance(one, int) for one in ids)
