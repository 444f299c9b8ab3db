"""llama.cpp's importance matrices in GGUF (``llama-imatrix``): how often each expert was chosen.

``general.type`` is ``imatrix``; for each tensor that was multiplied with there is ``NAME.counts``,
float32 [experts, 1], the rows that each expert of it saw (``tools/imatrix/imatrix.cpp``). The
matrices of a layer's experts saw the same rows. The router's own matrix saw each token once, so
that the experts of a token are known where both were counted. Older files, ``.dat``, have no
counts by expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from routeprof.errors import MissingExtraError, UsageError
from routeprof.formats.expert_ids import layers_of
from routeprof.formats.opening import one_of, reason_of, whole_counts
from routeprof.formats.source import Source, Step
from routeprof.metrics._arrays import IntArray
from routeprof.topology import Layer, ModelInfo

MAGIC = b"GGUF"
MOST_READS = 1 << 17
"""Pieces of a header that are looked at; an imatrix of 100 layers takes some 30,000."""

EXACT = 1 << 24
"""Whole numbers from here on have neighbours that float32 does not tell from them."""

_EXPERTS = re.compile(r"blk\.(\d{1,4})\.(ffn_(?:gate|up|down|gate_up)_exps)\.weight\.counts")
_ROUTER = re.compile(r"blk\.(\d{1,4})\.ffn_gate_inp\.weight\.counts")
_LAYER = re.compile(r"blk\.(\d{1,4})\.")
_DATA = re.compile(r"\.(?:dat|imatrix)")

ROUNDED = f"counts from {EXACT:,} on are rounded, as the file holds them as float32"
RATIO = "experts of a token are told by dividing what the experts saw by what the router saw"
ODD = (
    "what the experts saw is no multiple of what the router saw: the file was merged from others, "
    "or made with batches of fewer than 16 tokens, so the experts of a token are not known"
)


def is_imatrix(path: Path) -> bool:
    """A GGUF file, or an older imatrix by its ending."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC or bool(_DATA.fullmatch(path.suffix.lower()))


def read_imatrix(paths: Sequence[Path]) -> Source:
    """The counts of one file, which are sums over all that was read to make it.

    Raises:
        UsageError: it is damaged, no imatrix, of the older kind, or of a model without experts.
        MissingExtraError: the gguf package is not installed.
    """
    path = one_of(paths)
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise UsageError(
                f"{path} is no GGUF file: older .dat files have no counts by expert; make it anew "
                "with llama-imatrix --output-format gguf"
            )
    found = _Counts.of(path, _tensors(path))
    choices = {index: found.choices(index) for index in found.experts}
    widths = {len(counts) for counts in found.experts.values()}
    moe = {
        layer.index: layer
        for width in widths
        for layer in layers_of(
            path,
            {index: choices[index] for index, own in found.experts.items() if len(own) == width},
            width,
            lambda index: f"blk.{index}",
        )
    }
    layers = tuple(
        moe.get(index, Layer(index, f"blk.{index}", kind="dense")) for index in sorted(found.layers)
    )
    steps = [Step({index: own for index, own in found.experts.items() if own.any()})]
    model = ModelInfo(engine="llama.cpp")
    return Source("imatrix", layers, steps, "windows", model, notes=found.notes(choices))


@dataclass(frozen=True)
class _Counts:
    """What a file counted, by layer.

    Attributes:
        experts: assignments, int64 [experts]; router: tokens.
        layers: all that have a tensor.
    """

    path: Path
    experts: dict[int, IntArray]
    router: dict[int, int]
    layers: set[int]

    @classmethod
    def of(cls, path: Path, tensors: Iterable[tuple[str, Any]]) -> _Counts:
        found = cls(path, {}, {}, set())
        for name, values in tensors:
            layer = _LAYER.match(name)
            if layer is None or not name.endswith(".counts"):
                continue
            found.layers.add(int(layer[1]))
            counts = whole_counts(values, f"{path}, {name},").reshape(-1)
            if _EXPERTS.fullmatch(name):
                found.add(int(layer[1]), name, counts)
            elif _ROUTER.fullmatch(name) and len(counts) == 1:
                found.router[int(layer[1])] = int(counts[0])
        if not found.experts:
            raise UsageError(f"{path} has no counts of experts: pass one of a model with experts")
        return found

    def add(self, layer: int, name: str, counts: IntArray) -> None:
        """One of a layer's matrices, which must all have seen the same."""
        if len(counts) == 1:
            raise UsageError(
                f"{self.path} has a single count for all experts of {name}, as when it was made of "
                "an older .dat file: make it anew with llama-imatrix"
            )
        if not np.array_equal(self.experts.setdefault(layer, counts), counts):
            raise UsageError(
                f"{self.path} has other counts for {name} than for the layer's other experts: "
                "pass one that was not merged of different runs"
            )

    def choices(self, layer: int) -> int | None:
        """Experts of a token, where the router was counted, too, and nothing was rounded."""
        total, tokens = int(self.experts[layer].sum()), self.router.get(layer, 0)
        if not tokens or total % tokens or self._rounded(layer):
            return None
        top_k = total // tokens
        return top_k if 1 <= top_k <= len(self.experts[layer]) else None

    def _rounded(self, layer: int) -> bool:
        largest = max(int(self.experts[layer].max()), self.router.get(layer, 0))
        return largest >= EXACT

    def notes(self, choices: dict[int, int | None]) -> tuple[str, ...]:
        rounded = {layer for layer in self.experts if self._rounded(layer)}
        odd = {
            layer for layer, top_k in choices.items() if top_k is None and self.router.get(layer)
        }
        said = ((RATIO, any(choices.values())), (ODD, odd - rounded), (ROUNDED, rounded))
        return tuple(line for line, holds in said if holds)


def _tensors(path: Path) -> list[tuple[str, Any]]:
    """Names and values, the latter not read before they are asked for.

    A damaged header may send the gguf package out of the file, or round and round in it: it reads
    through ``_get``, which here refuses both.
    """
    try:
        whole: Any = import_module("gguf").GGUFReader
    except ImportError:
        raise MissingExtraError("gguf", "gguf") from None

    class Reader(whole):  # type: ignore[misc]
        reads = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            self.reads += 1
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data) or self.reads > MOST_READS:
                raise ValueError("a length that its header tells cannot be")
            return super()._get(offset, dtype, count, override_order)

    try:
        with np.errstate(all="ignore"):
            reader = Reader(path)
            kind = reader.get_field("general.type")
            if kind is None or kind.contents() != "imatrix":
                raise UsageError(f"{path} is a GGUF file, but no imatrix: pass one")
            return [(tensor.name, tensor.data) for tensor in reader.tensors]
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
        reason = reason_of(error)
        raise UsageError(f"{path} cannot be read ({reason}): pass another copy") from None
