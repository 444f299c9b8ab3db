"""The tensors of a safetensors checkpoint: where they are, and their bytes when asked for.

The format is 8 bytes of header length, a JSON header and raw little-endian data
(https://github.com/huggingface/safetensors#format). The library of that name maps whole files
into memory; here bytes are read into buffers that are used again, so that memory stays bounded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError

INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library, too."""

MOST_AXES = 64
"""As in torch; the product of a million numbers takes minutes."""

BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "BOOL": 8,
    "U8": 8, "I8": 8, "F16": 16, "BF16": 16, "U16": 16, "I16": 16, "F32": 32, "U32": 32, "I32": 32,
    "F64": 64, "U64": 64, "I64": 64, "C64": 64,
}  # fmt: skip
"""Bits of an element by the format's name of its type."""


@dataclass(frozen=True)
class Tensor:
    """One tensor: ``start`` is the offset of its first byte in ``file``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * BITS[self.dtype] // 8


def tensors_of(source: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name; only headers are read.

    Args:
        source: a directory with ``model.safetensors.index.json`` or ``*.safetensors``, or one file.

    Raises:
        UsageError: there is no such checkpoint, a shard is missing, or a header is broken.
    """
    found: dict[str, Tensor] = {}
    for file, wanted in _files(source):
        inside = header_of(file)
        missing = sorted(wanted - inside.keys())
        if missing:
            raise UsageError(f"{file} lacks {missing[0]}, which the index names; download it again")
        twice = sorted(inside.keys() & found.keys())
        if twice:
            raise UsageError(f"{twice[0]} is in two files of {source}; remove the wrong one")
        found.update(inside)
    return found


def _files(source: Path) -> Iterator[tuple[Path, set[str]]]:
    """Files to read, and the tensors that must be in each."""
    if not source.exists():
        raise UsageError(f"{source} does not exist; pass a model's directory")
    if source.is_file():
        yield source, set()
    elif (source / INDEX).is_file():
        yield from _shards(source)
    else:
        single = source / "model.safetensors"
        files = [single] if single.is_file() else sorted(source.glob("*.safetensors"))
        if not files:
            raise UsageError(f"no *.safetensors in {source}; pass a model saved as safetensors")
        for file in files:
            yield file, set()


def _shards(source: Path) -> Iterator[tuple[Path, set[str]]]:
    try:
        names = json.loads((source / INDEX).read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, set[str]] = {}
        for tensor, file in names.items():
            by_file.setdefault(os.fspath(file), set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{source / INDEX} is no index of shards; download it again") from None
    for file, wanted in sorted(by_file.items()):
        # An index could otherwise point at any file on this machine.
        if file in ("", "..") or Path(file).name != file or "\0" in file:
            raise UsageError(f"{source / INDEX} names a file outside of it; download it again")
        if not (source / file).is_file():
            raise UsageError(f"shard {file} is missing in {source}; download it again")
        yield source / file, wanted


def header_of(file: Path) -> dict[str, Tensor]:
    """The tensors in one file, by name.

    Raises:
        UsageError: it cannot be read or is not a whole safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise UsageError(f"{file} is cut off or no safetensors file; download it again")
            header = json.loads(stream.read(length))
        entries = {name: one for name, one in header.items() if name != "__metadata__"}
        return {name: _tensor(name, one, file, 8 + length, size) for name, one in entries.items()}
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror}); check it") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"the header of {file} is broken; download it again") from None


def _tensor(name: str, entry: Any, file: Path, data: int, size: int) -> Tensor:
    dtype, shape = entry["dtype"], entry["shape"]
    start, end = entry["data_offsets"]
    if len(shape) > MOST_AXES:
        raise ValueError(name)
    whole = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    if not whole or dtype not in BITS or (end - start) * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(name)
    if data + end > size:
        raise UsageError(f"{file} is cut off: {name} is not whole; download it again")
    return Tensor(name, file, dtype, tuple(shape), data + start)


class Source:
    """Open files of a checkpoint; threads may read at the same time."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def open(self, file: Path) -> None:
        """Open the file; to be called before threads read."""
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, file: Path, start: int, into: NDArray[Any]) -> None:
        """Fill a contiguous array with the bytes that begin at ``start``.

        Raises:
            UsageError: the file ends before, as when it is overwritten meanwhile.
        """
        view = into.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptors[file], [view[done:]], start + done)
            if count == 0:
                raise UsageError(f"{file} ended while it was read; download it again")
            done += count


@contextmanager
def opened() -> Iterator[Source]:
    """Files that are closed at the end."""
    source = Source()
    try:
        yield source
    finally:
        source.close()
