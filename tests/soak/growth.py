"""What a process holds, and whether it grows: samples, robust slopes, verdicts."""

from __future__ import annotations

import gc
import resource
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

MIB = 1024**2
WARM_UP = 0.25
"""Share of the samples that is left out: imports, pools and caches that fill once."""


@contextmanager
def only_what_is_new() -> Iterator[None]:
    """Leave objects that are there already out of collections and searches, for speed."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def holdings() -> dict[str, float]:
    """What this process holds now, after a collection."""
    gc.collect()
    found = {
        "resident memory, MiB": _resident(),
        "Python blocks": float(sys.getallocatedblocks()),
        "tensors, MiB": _tensors(),
        "file handles": float(len(list(Path("/proc/self/fd").iterdir()))),
        "threads": float(len(list(Path("/proc/self/task").iterdir()))),
        "Python threads": float(threading.active_count()),
    }
    if tracemalloc.is_tracing():
        found["traced memory, MiB"] = tracemalloc.get_traced_memory()[0] / MIB
    return found


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def _tensors() -> float:
    """Bytes of the storages that Python's tensors share."""
    storages = {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in gc.get_objects()
        # isinstance would ask lazy modules for their class, and some of them warn.
        if issubclass(type(item), torch.Tensor) and item.layout is torch.strided
    }
    return sum(storages.values()) / MIB


FULL = 400
"""Cycles after which the warm-up has filled every bounded buffer."""


@dataclass(frozen=True)
class Limit:
    """How much a quantity may grow from the first sample after the warm-up to the last.

    Attributes:
        once: in all, whatever the number of cycles.
        each: for each cycle besides.
        early: for each cycle besides, where there are too few for bounded buffers to be full: a
            recording of steps keeps notes of the newest 1,024, and a cycle has a dozen.
    """

    once: float
    each: float = 0.0
    early: float = 0.0


LIMITS = {
    # Allocators keep pages; a leak of 4 KiB a pass would be over 100 KiB a cycle.
    "resident memory, MiB": Limit(8.0, 0.02),
    "Python blocks": Limit(100.0, 0.5, 60.0),
    "tensors, MiB": Limit(0.05),
    "traced memory, MiB": Limit(0.3, 0.0005, 0.005),
    "file handles": Limit(0.9),
    "threads": Limit(0.9),
    "Python threads": Limit(0.9),
}


@dataclass(frozen=True)
class Trend:
    """A quantity over the cycles after the warm-up."""

    name: str
    first: float
    last: float
    growth: float
    limit: float

    @property
    def grows(self) -> bool:
        return self.growth > self.limit


def slope(values: Sequence[float]) -> float:
    """Growth a sample: the median of the slopes between all pairs (Theil 1950, Sen 1968).

    Up to 29 % of the samples can be anything without moving it much.
    """
    at = np.unique(np.linspace(0, len(values) - 1, min(len(values), 400)).astype(int))
    own: NDArray[np.float64] = np.asarray(values, float)[at]
    left, right = np.triu_indices(len(at), 1)
    return float(np.median((own[right] - own[left]) / (at[right] - at[left])))


def trends(samples: Mapping[str, Sequence[float]]) -> list[Trend]:
    """How each quantity went, by a robust line through the samples after the warm-up."""
    found = []
    for name, values in samples.items():
        kept = values[int(len(values) * WARM_UP) :]
        each = LIMITS[name].each + LIMITS[name].early * (len(values) < FULL)
        limit = LIMITS[name].once + each * len(kept)
        found.append(Trend(name, kept[0], kept[-1], slope(kept) * (len(kept) - 1), limit))
    return found
