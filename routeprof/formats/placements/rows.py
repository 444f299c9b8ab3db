"""What readers of placements share: JSON, tables of integers, and which row is which layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.opening import reason_of
from routeprof.formats.placements.expert_map import Deployment, ExpertMap
from routeprof.metrics._arrays import IntArray

_T = TypeVar("_T")


def opened(path: Path, opening: Callable[[Path], _T]) -> _T:
    """What ``opening`` makes of a file.

    Raises:
        UsageError: it cannot be read, whatever a hostile or damaged file makes of the parser.
    """
    if not path.is_file():
        raise UsageError(f"{path} is no file: pass a placement that an engine or routeprof wrote")
    try:
        return opening(path)
    except UsageError:
        raise
    except Exception as error:
        reason = reason_of(error)
        raise UsageError(f"{path} cannot be read ({reason}): pass another copy") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        UsageError: it cannot be read.
    """
    return opened(path, lambda path: json.loads(path.read_text(encoding="utf-8")))


def integers(path: Path, rows: object) -> IntArray:
    """Lists of integers of one length, or an array or tensor of them, as int64 ``[rows, slots]``.

    Raises:
        UsageError: something else.
    """
    array = _listed(rows) if isinstance(rows, list) else _array(rows)
    if array is None or not array.size:
        raise UsageError(
            f"{path} is no placement: it must have a row of as many expert numbers for each layer"
        )
    return array


def _listed(rows: list[Any]) -> IntArray | None:
    whole = all(isinstance(row, list) for row in rows) and len({len(row) for row in rows}) == 1
    if not whole or any(type(item) is not int for row in rows for item in row):
        return None
    try:
        return np.array(rows, dtype=np.int64)
    except OverflowError:
        return None


def _array(rows: object) -> IntArray | None:
    """Arrays, and what NumPy takes for one without unpickling."""
    if not hasattr(rows, "__array__"):
        return None
    array = np.asarray(rows)
    if array.dtype.kind not in "iu" or array.ndim != 2:
        return None
    return array.astype(np.int64)


def map_of_rows(
    path: Path, rows: IntArray, deployment: Deployment, layers: list[int] | None = None
) -> ExpertMap:
    """The map that a file's rows are.

    Args:
        layers: number of each row's layer; None where the file does not say, and its rows are the
            MoE layers in order.

    Raises:
        UsageError: rows of other layers, or a placement for another model.
    """
    wanted = list(deployment.layers)
    if layers is None:
        if len(rows) != len(wanted):
            raise UsageError(
                f"{path} has {len(rows)} layers, and the model {len(wanted)} MoE layers: pass a "
                f"placement for this model"
            )
        layers = wanted
    if sorted(layers) != wanted:
        raise UsageError(
            f"{path} places layers {_span(layers)}, and the model's MoE layers are "
            f"{_span(wanted)}: pass a placement for this model"
        )
    _require_experts(path, rows, deployment)
    try:
        return ExpertMap(deployment, rows[np.argsort(layers)])
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def require_gpus(path: Path, gpus: int, deployment: Deployment) -> None:
    """Check that a file is for as many GPUs.

    Raises:
        UsageError: it is not.
    """
    if gpus != deployment.gpus:
        raise UsageError(
            f"{path} is for {gpus} GPUs, not for {deployment.gpus}: pass a placement for as many"
        )


def _require_experts(path: Path, rows: IntArray, deployment: Deployment) -> None:
    experts = int(rows.max()) + 1
    if experts != deployment.experts:
        raise UsageError(
            f"{path} places {experts} experts, and the model has {deployment.experts}: pass a "
            f"placement for this model"
        )


def _span(layers: list[int]) -> str:
    shown = sorted(layers)
    if len(shown) > 2 and shown == list(range(shown[0], shown[-1] + 1)):
        return f"{shown[0]} to {shown[-1]}"
    return ", ".join(map(str, shown[:8])) + (", …" if len(shown) > 8 else "")
