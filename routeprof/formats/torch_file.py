"""Files of ``torch.save``, read without torch: containers, numbers, text and tensors, no code.

torch's own safe reader needs torch, which takes longer to import than such a file to read. What a
pickle may name here are four ways to rebuild a tensor; anything else is refused, and so is a file
that would take more memory than it has bytes.
"""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError
from routeprof.formats.opening import reason_of
from routeprof.formats.plain_pickle import loads

MOST_BYTES = 1 << 30
"""Of one tensor. SGLang's own buffer of 1,000 passes of DeepSeek-V3 takes 62 MB."""

MOST_PICKLE = 6 << 20
TENSORS = 8
"""Bytes of what is no tensor, or one in so many of the file if that is more: reading them is slow.
SGLang's lists take some 8 a token, and its tables of experts 32 for each layer."""

MOST_DIRECTORY = 8 << 20
"""Bytes of the list of members, some 70 for each tensor."""

MOST_REPEATED = 1 << 22
"""Elements, of all tensors together, beyond those that were saved: ``expand`` repeats them."""

_TYPES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
}
_DAMAGE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    struct.error,
    RuntimeError,
    AssertionError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    EOFError,
    OverflowError,
    MemoryError,
    OSError,
)
"""What a damaged or hostile file makes of the parsers."""


class _Budget:
    """Elements that tensors may yet have: a file must not make more of them than it holds."""

    def __init__(self) -> None:
        self.left = MOST_REPEATED

    def spend(self, elements: int) -> None:
        self.left -= elements
        if self.left < 0:
            raise ValueError("its tensors are larger than what was saved of them")


class _Storage(NamedTuple):
    """Elements as they lie in the file; tensors are views of them."""

    values: NDArray[Any]
    budget: _Budget


def is_torch(path: Path) -> bool:
    """A zip file as ``torch.save`` writes it, by its first bytes and its ending."""
    if path.suffix.lower() not in (".pt", ".pth") or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def read_torch(path: Path) -> Any:
    """What was saved; tensors are NumPy arrays.

    Raises:
        UsageError: the file is damaged, or holds something else than data.
    """
    try:
        _check_directory(path)
        with zipfile.ZipFile(path) as archive:
            return _Reader(archive, path.stat().st_size).load()
    except UsageError:
        raise
    except _DAMAGE as error:
        reason = reason_of(error)
        raise UsageError(f"{path} cannot be read ({reason}): pass another copy") from None


def _check_directory(path: Path) -> None:
    """Refuse a list of members that would take more memory than the rest of the file."""
    with path.open("rb") as file:
        # What ZipFile itself goes by: it has a say in several places, and they may differ.
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    size = end[zipfile._ECD_SIZE] if end else 0  # type: ignore[attr-defined]
    if size > MOST_DIRECTORY:
        raise ValueError(f"its list of members has {size:,} bytes")


class _Reader:
    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self._archive = archive
        self._left = size
        self._most = max(MOST_PICKLE, size // TENSORS)
        self._budget = _Budget()
        self._members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in self._members if re.fullmatch(r"[^/]+/data\.pkl", name)]
        if not pickles:
            raise ValueError("it holds no data.pkl, as files of torch.save do")
        self._root = pickles[0].removesuffix("data.pkl")
        order = f"{self._root}byteorder"
        self._big = order in self._members and self._read(order, 16) == b"big"
        self._storages: dict[str, _Storage] = {}

    def load(self) -> Any:
        return loads(
            self._read(f"{self._root}data.pkl", self._most), self._storage, _TYPES, _ALLOWED
        )

    def _read(self, name: str, most: int) -> bytes:
        """A member; torch does not compress, so none is larger than the file."""
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed, as torch never does")
        if member.file_size > most:
            raise ValueError(f"{name} has {member.file_size:,} bytes, more than it can need")
        self._left -= member.file_size
        if self._left < 0:
            raise ValueError("its members are larger than the file")
        return self._archive.read(member)

    def _storage(self, told: Any) -> _Storage:
        """Persistent id: ``("storage", type, key, device, elements)``."""
        _, kind, key, _, elements = told
        if not isinstance(key, str) or not isinstance(kind, str):
            raise ValueError("a tensor has no name")
        if key not in self._storages:
            values = np.frombuffer(self._read(f"{self._root}data/{key}", MOST_BYTES), np.uint8)
            dtype = np.dtype(_TYPES[kind]).newbyteorder(">" if self._big else "<")
            values = values.view(dtype)[: int(elements)]
            self._budget.left += len(values)
            self._storages[key] = _Storage(values, self._budget)
        return self._storages[key]


def _tensor(
    storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> NDArray[Any]:
    """A tensor as a view of its storage, in this machine's byte order."""
    values = storage.values
    if min((offset, *size, *stride), default=0) < 0 or len(size) != len(stride):
        raise ValueError("a tensor has a shape that cannot be")
    elements = int(np.prod(size, dtype=object))
    last = offset + sum((one - 1) * step for one, step in zip(size, stride, strict=True))
    if elements and last >= len(values):
        raise ValueError("a tensor is larger than what was saved of it")
    storage.budget.spend(elements)
    steps = [step * values.itemsize for step in stride]
    if not elements:
        return np.zeros(size, dtype=values.dtype)
    view = np.lib.stride_tricks.as_strided(values[offset:], size, steps, writeable=False)
    return view.astype(values.dtype.newbyteorder("="), copy=False)


def _device(*told: Any) -> str:
    return told[0] if told and isinstance(told[0], str) else ""


def _size(sides: Any = ()) -> tuple[Any, ...]:
    if not isinstance(sides, tuple | list):
        raise ValueError("a size is no list")
    return tuple(sides)


def _ordered() -> OrderedDict[Any, Any]:
    return OrderedDict()


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("collections", "OrderedDict"): _ordered,
    ("torch", "device"): _device,
    ("torch", "Size"): _size,
}
