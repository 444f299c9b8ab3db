"""Files of ``torch.save``, read without torch: containers, numbers, text and tensors, no code.

torch's own safe reader needs torch, which takes longer to import than such a file to read. What a
pickle may name here are four ways to rebuild a tensor; anything else is refused, and so is a file
that would take more memory than it has bytes.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError

MOST_BYTES = 1 << 30
"""Of one tensor. SGLang's own buffer of 1,000 passes of DeepSeek-V3 takes 62 MB."""

MOST_PICKLE = 64 << 20
MOST_REPEATED = 1 << 22
"""Elements of a tensor that repeats what was saved, as ``expand`` makes it."""

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
    NotImplementedError,
    RecursionError,
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


class _Storage(NamedTuple):
    """Elements as they lie in the file; tensors are views of them."""

    values: NDArray[Any]


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
        with zipfile.ZipFile(path) as archive:
            return _Reader(archive).load()
    except UsageError:
        raise
    except _DAMAGE as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise UsageError(f"{path} cannot be read ({reason}): pass another copy") from None


class _Reader:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in self._members if re.fullmatch(r"[^/]+/data\.pkl", name)]
        if not pickles:
            raise ValueError("it holds no data.pkl, as files of torch.save do")
        self._root = pickles[0].removesuffix("data.pkl")
        order = f"{self._root}byteorder"
        self._big = order in self._members and self._read(order, 16) == b"big"
        self._storages: dict[str, _Storage] = {}

    def load(self) -> Any:
        unpickler = _Unpickler(io.BytesIO(self._read(f"{self._root}data.pkl", MOST_PICKLE)))
        unpickler.storage = self._storage
        return unpickler.load()

    def _read(self, name: str, most: int) -> bytes:
        """A member; torch does not compress, so none is larger than the file."""
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed, as torch never does")
        if member.file_size > most:
            raise ValueError(f"{name} has {member.file_size:,} bytes, more than it can need")
        return self._archive.read(member)

    def _storage(self, told: Any) -> _Storage:
        """Persistent id: ``("storage", type, key, device, elements)``."""
        _, kind, key, _, elements = told
        if key not in self._storages:
            values = np.frombuffer(self._read(f"{self._root}data/{key}", MOST_BYTES), np.uint8)
            dtype = np.dtype(_TYPES[kind]).newbyteorder(">" if self._big else "<")
            self._storages[key] = _Storage(values.view(dtype)[: int(elements)])
        return self._storages[key]


class _Unpickler(pickle._Unpickler):
    """The one written in Python: C's takes memory for whatever index a pickle may name."""

    storage: Callable[[Any], _Storage]

    def persistent_load(self, pid: Any) -> _Storage:
        return self.storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _TYPES:
            return name
        known = _ALLOWED.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no data")
        return known


def _tensor(
    storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> NDArray[Any]:
    """A tensor as a copy of its elements, within its storage."""
    values = storage.values
    if min((offset, *size, *stride), default=0) < 0 or len(size) != len(stride):
        raise ValueError("a tensor has a shape that cannot be")
    elements = int(np.prod(size, dtype=object))
    last = offset + sum((one - 1) * step for one, step in zip(size, stride, strict=True))
    if elements and (last >= len(values) or elements > max(len(values), MOST_REPEATED)):
        raise ValueError("a tensor is larger than what was saved of it")
    steps = [step * values.itemsize for step in stride]
    if not elements:
        return np.zeros(size, dtype=values.dtype)
    view = np.lib.stride_tricks.as_strided(values[offset:], size, steps, writeable=False)
    return np.array(view, dtype=values.dtype.newbyteorder("="))


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "device"): lambda *told: str(told[0]) if told else "",
    ("torch", "Size"): tuple,
}
