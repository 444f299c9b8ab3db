"""A table for everything else: ``layer,slot,gpu,expert``, a row for each slot."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.placements.expert_map import Deployment, ExpertMap
from routeprof.formats.placements.rows import map_of_rows, opened, require_gpus
from routeprof.metrics._arrays import IntArray

COLUMNS = ["layer", "slot", "gpu", "expert"]


def write(placement: ExpertMap, path: Path) -> None:
    """Write a .csv file; layers are numbered as in the model."""
    slots = placement.slots.shape[1]
    per_gpu = slots // placement.deployment.gpus
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for layer, row in zip(placement.deployment.layers, placement.slots.tolist(), strict=True):
            table.writerows(
                (layer, slot, slot // per_gpu, expert) for slot, expert in enumerate(row)
            )


def read(path: Path, deployment: Deployment) -> ExpertMap:
    """Read a .csv file; rows may be in any order.

    Raises:
        UsageError: it is no placement, or one for another model.
    """
    cells = opened(path, _load)
    layers, rows = np.unique(cells[:, 0]), len(cells)
    slots = rows // len(layers)
    cells = cells[np.lexsort((cells[:, 1], cells[:, 0]))]
    slot_of_row = np.tile(np.arange(slots), len(layers))
    each_once = rows == len(layers) * slots and np.array_equal(cells[:, 1], slot_of_row)
    each_once &= np.array_equal(cells[:, 0], np.repeat(layers, slots))
    if not each_once:
        raise UsageError(f"{path} lacks slots or repeats some: give each layer slots 0, 1, …")
    gpus = int(cells[:, 2].max()) + 1
    require_gpus(path, gpus, deployment)
    if not np.array_equal(cells[:, 2], cells[:, 1] * gpus // slots) or slots % gpus:
        raise UsageError(f"{path} does not deal slots to GPUs in order, as many to each: do so")
    experts = cells[:, 3].reshape(len(layers), slots)
    return map_of_rows(path, experts, deployment, layers.tolist())


def _load(path: Path) -> IntArray:
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = [row for row in csv.reader(file, strict=True) if row]
    if header != COLUMNS:
        raise ValueError(f"the first line is not {','.join(COLUMNS)}")
    cells = np.array([[int(cell) for cell in row] for row in rows], dtype=np.int64)
    if cells.ndim != 2 or cells.shape[1] != len(COLUMNS) or cells.min() < 0:
        raise ValueError("not four whole numbers in each line")
    return cells
