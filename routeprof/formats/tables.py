"""Plain counts: CSV ``layer,expert,count``, and NPY arrays of layers and experts.

A CSV may have columns ``phase``, ``tag`` and ``step``, too. Rows of the same cell add up; a cell
without a row got nothing, as other rows of its layer were written. An array is
``[layers, experts]``, or ``[steps, layers, experts]``; its rows are layers 0, 1, 2 …
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError
from routeprof.formats.opening import (
    HEADER_DAMAGE,
    MOST,
    MOST_CELLS,
    one_of,
    reason_of,
    whole_counts,
)
from routeprof.formats.source import Source, Step
from routeprof.metrics._arrays import IntArray
from routeprof.topology import PHASES, Layer

COLUMNS = {"layer", "expert", "count"}
MORE = {"phase", "tag", "step"}


def is_csv(path: Path) -> bool:
    """A .csv file whose first line names layer, expert and count."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return False
    with path.open("rb") as file:
        names = file.readline(1000).decode("utf-8", "replace").strip().lower().split(",")
    return set(names) >= COLUMNS


def read_csv(paths: Sequence[Path]) -> Source:
    """Counts by layer and expert, of all time or by step.

    Raises:
        UsageError: a row without the numbers that it must have.
    """
    path = one_of(paths)
    cells: dict[tuple[int, str, str | None], dict[tuple[int, int], int]] = {}
    stepped = False
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
        stepped = "step" in reader.fieldnames
        try:
            for row in reader:
                place, cell, count = _parsed(row, f"{path}, line {reader.line_num}")
                cells.setdefault(place, {}).setdefault(cell, 0)
                cells[place][cell] += count
        except csv.Error as error:
            where = f"{path}, line {reader.line_num}"
            raise UsageError(f"{where} is no line of a table ({error}): mend it") from None
    layers = _layers(path, (cell for own in cells.values() for cell in own))
    known = {layer.index: layer.experts for layer in layers}
    return Source("csv", layers, _steps(cells, known), "steps" if stepped else "windows")


def _parsed(
    row: dict[str, str], where: str
) -> tuple[tuple[int, str, str | None], tuple[int, int], int]:
    try:
        layer, expert, count = (int(row[name]) for name in ("layer", "expert", "count"))
        step = int(row.get("step") or 0)
    except (TypeError, ValueError, KeyError):
        raise UsageError(f"{where} lacks whole numbers layer, expert and count: mend it") from None
    phase = (row.get("phase") or "unknown").strip()
    if min(layer, expert, count) < 0 or phase not in PHASES:
        raise UsageError(
            f"{where} has a number below 0 or a phase other than {', '.join(PHASES)}: mend it"
        )
    if count > MOST:
        raise UsageError(f"{where} has a count too large to be true: mend it")
    return (step, phase, row.get("tag") or None), (layer, expert), count


def _layers(path: Path, cells: Iterable[tuple[int, int]]) -> tuple[Layer, ...]:
    widest: dict[int, int] = {}
    for layer, expert in cells:
        widest[layer] = max(widest.get(layer, 0), expert + 1)
    experts = max(widest.values(), default=0)
    if experts * len(widest) > MOST_CELLS:
        raise UsageError(f"{path} has numbers of layers and experts too large to be true: mend it")
    return tuple(_layer(index, experts) for index in sorted(widest))


def _layer(index: int, experts: int) -> Layer:
    return Layer(index, f"layer {index}", experts=experts, top_k=None)


def _steps(
    cells: dict[tuple[int, str, str | None], dict[tuple[int, int], int]], experts: dict[int, int]
) -> Iterator[Step]:
    for (_, phase, tag), own in sorted(cells.items(), key=lambda item: item[0][0]):
        counts: dict[int, IntArray] = {}
        for (layer, expert), count in own.items():
            if layer not in counts:
                counts[layer] = np.zeros(experts[layer], dtype=np.int64)
            counts[layer][expert] = count
        yield Step(counts, phase=phase, tag=tag)


def is_npy(path: Path) -> bool:
    """A .npy file."""
    return path.suffix.lower() == ".npy" and path.is_file()


def read_npy(paths: Sequence[Path]) -> Source:
    """An array ``[layers, experts]`` or ``[steps, layers, experts]``.

    Raises:
        UsageError: an array of another kind or shape.
    """
    path = one_of(paths)
    array = whole_counts(_mapped(path), str(path))
    if array.ndim not in (2, 3) or not array.size:
        raise UsageError(
            f"{path} has shape {array.shape}: pass [layers, experts] or [steps, layers, experts]"
        )
    if _is_placement(array):
        raise UsageError(
            f"{path} says which expert is where [gpus, layers, experts], not how much it got: pass "
            "counts, and this to whatif placement --today"
        )
    return of_array("npy", array)


def _is_placement(array: IntArray) -> bool:
    """Whether each expert is on one GPU or a few, and all GPUs hold as many."""
    if array.ndim != 3 or array.max() > 1:
        return False
    copies, held = array.sum(axis=0), array.sum(axis=2)
    few = copies.sum(axis=1) <= 2 * array.shape[2]
    return bool(copies.min() and few.all() and held.min() == held.max())


def of_array(tool: str, array: NDArray[np.int64], notes: tuple[str, ...] = ()) -> Source:
    """Sums ``[layers, experts]`` or steps ``[steps, layers, experts]``, of all layers in order.

    A layer whose row is zero throughout is dense: a router that never chose cannot be told from
    none.
    """
    steps = array if array.ndim == 3 else array[None]
    routed = np.asarray(steps.any(axis=(0, 2)))
    experts = steps.shape[2]
    layers = tuple(
        _layer(index, experts) if routes else Layer(index, f"layer {index}", kind="dense")
        for index, routes in enumerate(routed.tolist())
    )
    places = np.flatnonzero(routed)
    if not len(places):
        raise UsageError(f"the {tool} file counts nothing at all: pass one with counts")
    rows = (Step({int(place): step[place] for place in places}) for step in steps)
    if not routed.all():
        dense = ", ".join(str(place) for place in np.flatnonzero(~routed))
        notes = (*notes, f"layers {dense} have no counts and are taken to be dense")
    return Source(tool, layers, rows, "steps" if array.ndim == 3 else "windows", notes=notes)


def _mapped(path: Path) -> NDArray[np.generic]:
    """The array, not read before it is asked for: a header may promise more than there is."""
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, OSError, EOFError, *HEADER_DAMAGE) as error:
        reason = reason_of(error)
        raise UsageError(f"{path} cannot be read ({reason}): pass another copy") from None
