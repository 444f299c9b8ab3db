"""SGLang's expert distribution recorder: stat, stat_approx, per_pass, per_token, logical counts.

Schemas are those of SGLang 0.5.23 (``srt/eplb/expert_distribution.py``).

* ``stat`` and ``stat_approx`` hold a ring of steps, ``logical_count`` [steps, layers, experts]:
  rows that were not filled are zero, and the order is not that of time.
* ``per_pass`` holds for each pass and rank the counts of slots, and one map of slots to experts,
  which was in force when the file was written. Ranks that see the same pass are added up.
* ``per_token`` has each token's experts besides, in a table 8 wide that is filled up with -1.
* ``{"logical_count": [layers][experts]}`` as JSON is what ``--init-expert-location`` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.documents import parsed
from routeprof.formats.opening import one_of, whole_counts
from routeprof.formats.sglang_passes import ENGINE, REPEATED, Dump, of_passes
from routeprof.formats.source import Source
from routeprof.formats.tables import of_array
from routeprof.formats.torch_file import is_torch, read_torch
from routeprof.metrics._arrays import IntArray

RING = "steps are not in the order of time"
FULL = "the ring of {:,} steps is full: older ones are lost"


def is_sglang(path: Path) -> bool:
    """A file of ``torch.save``, or JSON that begins with logical counts."""
    if is_torch(path):
        return True
    if path.suffix.lower() != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"logical_count"' in file.read(4096)


def read_sglang(paths: Sequence[Path]) -> Source:
    """Dumps of one run: one of all ranks, or one of each.

    Raises:
        UsageError: none of the recorder's, of different modes, or twice the same rank.
    """
    dumps = [_dump(path) for path in paths]
    if all("logical_count" in one for one in dumps):
        path = one_of(paths)
        found = dumps[0]["logical_count"]
        if is_torch(path) and not isinstance(found, np.ndarray):
            raise UsageError(f"{path} has a logical_count that is no tensor: pass another copy")
        return _of_ring(whole_counts(found, str(path)), path)
    if all("records" in one for one in dumps):
        return of_passes([Dump(path, one) for path, one in zip(paths, dumps, strict=True)])
    raise UsageError(
        f"{paths[0]} is no dump of SGLang's expert distribution recorder: pass files of one mode"
    )


def _dump(path: Path) -> dict[str, Any]:
    if path.suffix.lower() == ".json":
        found = parsed(path.read_bytes(), str(path))
    else:
        found = read_torch(path)
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no dictionary, as SGLang's dumps do: pass another file")
    return found


def _of_ring(counts: IntArray, path: Path) -> Source:
    if counts.ndim not in (2, 3):
        raise UsageError(
            f"{path} has logical_count of shape {counts.shape}: pass [layers, experts] or "
            "[steps, layers, experts]"
        )
    if counts.ndim == 2:
        return replace(of_array("sglang", counts, (REPEATED,)), model=ENGINE)
    filled = counts[counts.any(axis=(1, 2))]
    notes = (REPEATED, RING, *([FULL.format(len(counts))] if len(filled) == len(counts) else []))
    return replace(of_array("sglang", filled, notes), model=ENGINE)
