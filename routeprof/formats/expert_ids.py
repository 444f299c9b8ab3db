"""Experts of each token, as traces hold them, and what a hostile trace must not make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from routeprof.errors import UsageError
from routeprof.metrics._arrays import IntArray
from routeprof.topology import Layer

MOST_EXPERTS = 1 << 12
MOST_CELLS = 1 << 20
"""Of a layer, and of all layers together, where each step has its own counts."""

UNSEEN = (
    "the file does not say how many experts there are: they are taken to end at the highest that "
    "a token chose, so experts without a token may be missing"
)


def within(ids: IntArray, experts: int) -> IntArray:
    """The ids, with -1 for those that are no expert's."""
    return np.where((ids >= 0) & (ids < experts), ids, -1)


def whole_ids(values: Any, tokens: int, top_k: int) -> IntArray:
    """A table of ids, int64 [tokens, top_k].

    Raises:
        ValueError: it is something else.
    """
    table = np.asarray(values)
    if not tokens * top_k and not table.size:
        return np.zeros((tokens, top_k), dtype=np.int64)
    if table.dtype.kind not in "iu" or table.shape != (tokens, top_k):
        raise ValueError(f"a table of {table.dtype} {table.shape}, not of {tokens} × {top_k} ids")
    return table.astype(np.int64)


def layers_of(
    path: Path, choices: Mapping[int, int | None], experts: int, name: Callable[[int], str] = str
) -> tuple[Layer, ...]:
    """The layers of a trace.

    Args:
        choices: experts of a token, by a layer's index.
        name: a layer's, of its index.

    Raises:
        UsageError: there are none, or they cannot be true.
    """
    if not choices:
        raise UsageError(f"{path} holds no record: pass one with tokens")
    each = {1 if k is None else k for k in choices.values()}
    if not 1 <= min(each) <= max(each) <= experts <= MOST_EXPERTS:
        raise UsageError(
            f"{path} tells of {experts:,} experts and {max(each):,} for a token, which cannot be: "
            "pass another copy"
        )
    if experts * len(choices) > MOST_CELLS:
        raise UsageError(f"{path} has too many layers and experts to be true: pass another copy")
    return tuple(
        Layer(index, name(index), experts=experts, top_k=choices[index])
        for index in sorted(choices)
    )
