"""The tensors in a rank's file of TensorRT-LLM's expert statistics, found without reading them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError
from routeprof.metrics._arrays import IntArray

LONGEST_HEADER = 16 << 20
"""Bytes: 3,000 iterations of 61 layers."""

_TYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U16": "<u2", "U8": "u1"}
_KEY = re.compile(r"(\d{1,15})_(\d{1,5})")


def rank_files(directory: Path, pattern: str) -> dict[int, Path]:
    """Files by the rank in their name, the only group of the pattern."""
    found = {}
    for path in sorted(directory.iterdir()):
        match = re.fullmatch(pattern, path.name)
        if match and path.is_file():
            found[int(match[1])] = path
    return found


@dataclass(frozen=True)
class RankFile:
    """One file; arrays have a row for each tensor, by iteration and layer.

    Attributes:
        iteration, layer: int64 [tensors].
        start: int64 [tensors], of its first byte.
        shape: int64 [tensors, axes].
    """

    path: Path
    dtype: np.dtype[Any]
    iteration: IntArray
    layer: IntArray
    start: IntArray
    shape: IntArray

    def of(self, iteration: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Layers of an iteration, and their tensors."""
        first, last = np.searchsorted(self.iteration, [iteration, iteration + 1])
        for row in range(first, last):
            shape = tuple(self.shape[row].tolist())
            count, start = int(np.prod(shape)), int(self.start[row])
            values = self._bytes[start : start + count * self.dtype.itemsize].view(self.dtype)
            yield int(self.layer[row]), values.reshape(shape)

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        return np.memmap(self.path, dtype=np.uint8, mode="r")


def opened(path: Path, axes: int) -> RankFile:
    """A file whose tensors all have so many axes, and one type.

    Raises:
        UsageError: it is none, or damaged.
    """
    tensors = _header(path)
    kinds = {(tensor.dtype, len(tensor.shape)) for tensor in tensors.values()}
    keys = [_KEY.fullmatch(name) for name in tensors]
    if len(kinds) > 1 or any(dtype not in _TYPES or n != axes for dtype, n in kinds):
        raise UsageError(f"{path} holds tensors of other kinds than counts: pass another directory")
    if not all(keys):
        raise UsageError(f"{path} has names that are no iteration_layer: pass another directory")
    rows = sorted(
        (int(key[1]), int(key[2]), tensor.start, *tensor.shape)
        for key, tensor in zip(keys, tensors.values(), strict=True)
        if key
    )
    if len({row[:2] for row in rows}) < len(rows) or max(map(max, rows), default=0) >= 2**63:
        raise UsageError(f"{path} names an iteration and layer twice: pass another copy")
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 3 + axes)
    dtype = np.dtype(_TYPES[next(iter(kinds))[0]] if kinds else "<i8")
    return RankFile(path, dtype, table[:, 0], table[:, 1], table[:, 2], table[:, 3:])


def _header(path: Path) -> Any:
    from routeprof.plan.audit.checkpoint import header_of

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > LONGEST_HEADER:
        raise UsageError(f"{path} has a header of {length:,} bytes, too long: pass another copy")
    try:
        return header_of(path)
    except UsageError:
        raise UsageError(f"{path} is damaged or no safetensors file: pass another copy") from None
