"""CD-MoE's sums of weights: ``{"<layer>-<expert>": [sum of weights, count, mean weight]}``.

As ``duterscmy/CD-MoE`` writes them; layers count MoE layers alone. An expert without a key was not
chosen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.documents import parsed
from routeprof.formats.expert_ids import UNSEEN, layers_of
from routeprof.formats.opening import one_of, whole_counts
from routeprof.formats.source import Source, Step, Told

NOTE = "layers are numbered as in the file, which may leave dense layers out"
_KEY = re.compile(r"(\d{1,5})-(\d{1,5})")
_HEAD = re.compile(rb'\s*\{\s*"\d{1,5}-\d{1,5}"\s*:\s*\[')


def is_cdmoe(path: Path) -> bool:
    """JSON whose first key is a layer and an expert."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return _HEAD.match(file.read(256)) is not None


def read_cdmoe(paths: Sequence[Path], told: Told) -> Source:
    """Counts by layer and expert, of all time.

    Raises:
        UsageError: other keys, or values without a count.
    """
    path = one_of(paths)
    cells: dict[tuple[int, int], int] = {}
    found = parsed(path.read_bytes(), str(path))
    for key, value in found.items() if isinstance(found, dict) else ():
        place = _KEY.fullmatch(key)
        if place is None or not isinstance(value, list) or len(value) != 3:
            raise UsageError(f"{path} has {key!r}, not layer-expert with three numbers: mend it")
        cells[int(place[1]), int(place[2])] = int(whole_counts(value[1:2], str(path))[0])
    experts = told.experts or 1 + max((expert for _, expert in cells), default=0)
    indices = {layer for layer, _ in cells}
    layers = layers_of(path, dict.fromkeys(indices, None), experts, lambda one: f"layer {one}")
    counts = {index: np.zeros(experts, dtype=np.int64) for index in indices}
    for (layer, expert), count in cells.items():
        if expert >= experts:
            raise UsageError(f"{path} has expert {expert}: pass more --experts than {experts}")
        counts[layer][expert] = count
    notes = (NOTE,) if told.experts else (NOTE, UNSEEN)
    return Source("cd-moe", layers, [Step(counts)], "windows", notes=notes)
