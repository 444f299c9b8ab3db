"""``layer,expert`` lines of llama.cpp's ``moe-trace`` example: a line for each assignment.

The example is pull request 28544 of ggml-org/llama.cpp; the first line may name the columns. Which
lines are of the same token, and of which pass, it does not say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from routeprof.errors import UsageError
from routeprof.formats.expert_ids import MOST_CELLS, UNSEEN, layers_of
from routeprof.formats.opening import one_of, reason_of
from routeprof.formats.source import Source, Step, Told
from routeprof.metrics._arrays import IntArray
from routeprof.topology import ModelInfo

_HEADING = re.compile(rb"\s*layer\s*,\s*expert\s*")
_LINE = re.compile(rb"\s*\d+\s*,\s*\d+\s*")
_COLUMNS = pa.schema([("layer", pa.int64()), ("expert", pa.int64())])


def is_moe_trace(path: Path) -> bool:
    """A .csv file that begins with ``layer,expert``, or with two whole numbers."""
    first = _first_line(path)
    return bool(_HEADING.fullmatch(first) or _LINE.fullmatch(first))


def read_moe_trace(paths: Sequence[Path], told: Told) -> Source:
    """Sums over the whole file.

    Raises:
        UsageError: a line that is no layer and expert, or none at all.
    """
    path = one_of(paths)
    counts = np.zeros((0, 0), dtype=np.int64)
    try:
        for layer, expert in _batches(path):
            shape = (int(layer.max(initial=-1)) + 1, int(expert.max(initial=-1)) + 1)
            if min(layer.min(initial=0), expert.min(initial=0)) < 0:
                raise ValueError("a number below 0")
            counts = _widened(counts, shape)
            np.add.at(counts, (layer, expert), 1)
    except ValueError as error:  # pyarrow's own is one, too
        reason = reason_of(error)
        raise UsageError(f"{path} has lines that are no layer,expert ({reason}): mend it") from None
    experts = told.experts or counts.shape[1]
    if experts < counts.shape[1]:
        raise UsageError(f"{path} has an expert {counts.shape[1] - 1}: pass more --experts")
    counts = _widened(counts, (counts.shape[0], experts))
    routed = np.flatnonzero(counts.any(axis=1)).tolist()
    layers = layers_of(path, dict.fromkeys(routed), experts, lambda index: f"blk.{index}")
    steps = [Step({index: counts[index] for index in routed})]
    model = ModelInfo(engine="llama.cpp")
    notes = () if told.experts else (UNSEEN,)
    return Source("moe-trace", layers, steps, "windows", model, notes=notes)


def _first_line(path: Path) -> bytes:
    if path.suffix.lower() != ".csv" or not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.readline(100)


def _batches(path: Path) -> Iterator[tuple[IntArray, IntArray]]:
    options = pyarrow.csv.ReadOptions(
        column_names=_COLUMNS.names, skip_rows=int(bool(_HEADING.fullmatch(_first_line(path))))
    )
    types = pyarrow.csv.ConvertOptions(column_types=_COLUMNS, null_values=[])
    with pyarrow.csv.open_csv(path, options, convert_options=types) as batches:
        for batch in batches:
            layer, expert = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
            yield layer, expert


def _widened(counts: IntArray, shape: tuple[int, int]) -> IntArray:
    layers, experts = (max(one, other) for one, other in zip(counts.shape, shape, strict=True))
    if layers * experts > MOST_CELLS:
        raise ValueError("numbers too large to be true")
    return np.pad(counts, [(0, layers - counts.shape[0]), (0, experts - counts.shape[1])])
