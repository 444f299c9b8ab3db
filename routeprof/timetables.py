"""Tables over time and size: windows, steps, and the GEMM sizes of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.metrics import gemm
from routeprof.recording.fold import Windows
from routeprof.tables import framed, moe_layers, tag_name

if TYPE_CHECKING:
    from routeprof.profile import Profile

WINDOW_COLUMNS = "window phase tag layer start end steps tokens imbalance_ratio".split()
STEP_COLUMNS = (
    "step layer time phase tokens requests imbalance_ratio max_load overflow_rate_1.0"
).split()
GEMM_COLUMNS = "layer cells small_gemm_share mean_tokens p50_at_most".split()


def windows_table(profile: Profile) -> pd.DataFrame:
    """See ``Profile.windows``; windows are numbered by their time over all ranks."""
    windows = profile.totals.windows
    layers = profile.info.layers
    experts = np.array([layer.experts for layer in layers] or [0])[windows.layer]
    unknown = np.array([layer.top_k is None for layer in layers] or [False])
    with np.errstate(invalid="ignore", divide="ignore"):
        imbalance = windows.max_count * experts / windows.assignments
    frame = pd.DataFrame(
        {
            "window": _numbered(windows),
            "phase": np.array([key[0] for key in profile.totals.keys] or [""])[windows.key],
            "tag": np.array([tag_name(key[1]) for key in profile.totals.keys] or [""])[windows.key],
            "layer": np.array([layer.index for layer in layers] or [0])[windows.layer],
            "start": windows.start,
            "end": windows.end,
            "steps": windows.steps,
            "tokens": _tokens(windows.tokens, unknown[windows.layer]),
            "imbalance_ratio": imbalance,
        },
        columns=WINDOW_COLUMNS,
    )
    return frame.sort_values(WINDOW_COLUMNS[:4], ignore_index=True)


def _tokens(tokens: NDArray[np.int64], unknown: NDArray[np.bool_]) -> NDArray[Any]:
    """Tokens, NaN where a converted file knows assignments alone."""
    return np.where(unknown, np.nan, tokens) if unknown.any() else tokens


def _numbered(windows: Windows) -> NDArray[np.int64]:
    if not len(windows.window):
        return windows.window
    order = np.stack([windows.start, windows.rank, windows.window], axis=1)
    return np.unique(order, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def steps_table(profile: Profile) -> pd.DataFrame:
    """See ``Profile.steps``."""
    profile.need_batches()
    steps = profile.step_counts()
    layers = {layer.index: layer for _, layer in moe_layers(profile)}
    experts = np.array([layers[index].experts for index in steps.layer], dtype=np.int64)
    unknown = np.array([layers[index].top_k is None for index in steps.layer], dtype=bool)
    top_k = np.array([layers[index].top_k or 0 for index in steps.layer], dtype=np.int64)
    largest, total = steps.counts.max(1, initial=0), steps.counts.sum(1)
    # Capacity at factor 1, rounded up: ceil(tokens · k / experts).
    slots = -(-steps.tokens * top_k // np.maximum(experts, 1))
    over = np.maximum(steps.counts - slots[:, None], 0).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        frame = pd.DataFrame(
            {
                "step": steps.step,
                "layer": steps.layer,
                "time": steps.time,
                "phase": steps.phase,
                "tokens": _tokens(steps.tokens, unknown),
                "requests": pd.array(steps.requests, dtype="Int64"),
                "imbalance_ratio": largest * experts / total,
                "max_load": largest,
                "overflow_rate_1.0": over / np.where(unknown, np.nan, steps.tokens * top_k),
            },
            columns=STEP_COLUMNS,
        )
    frame.loc[frame["requests"] < 0, "requests"] = pd.NA
    return frame.sort_values(["step", "layer"], kind="stable", ignore_index=True)


def gemm_table(profile: Profile) -> pd.DataFrame:
    """See ``Profile.gemm``; cells are (expert, step) pairs that got tokens."""
    histograms = profile.totals.lists["gemm_histogram"].sum(0)
    rows = []
    for position, layer in moe_layers(profile):
        cells = histograms[position]
        busy = int(cells[1:].sum()) if len(cells) else 0
        if not busy:
            continue
        sizes = gemm.gemm_size_table(cells)
        middle = int(np.searchsorted(np.cumsum(cells[1:]), busy / 2)) + 1
        rows.append(
            {
                "layer": layer.index,
                "cells": busy,
                "small_gemm_share": float(gemm.small_gemm_share(cells)),
                "mean_tokens": profile.totals.lists["counts"][:, position].sum() / busy,
                "p50_at_most": int(sizes.upper[middle]),
            }
        )
    return framed(rows, GEMM_COLUMNS, ["layer"])
