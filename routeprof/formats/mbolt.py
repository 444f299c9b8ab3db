"""mbolt's traces of llama.cpp (``MBOLT_TRACE``): the experts of every token in every layer.

A stream of little-endian int32 (mbolt 0.1.0, ``trace.py``): the letters ``MBLT``, version 1 and the
number of experts; then for each layer of each pass ``layer, k, n_tokens`` and ``n_tokens`` times
the ``k`` ids of a token. A pass ends where the layers begin again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError
from routeprof.formats.expert_ids import MOST_EXPERTS, layers_of, within
from routeprof.formats.opening import one_of
from routeprof.formats.source import Source, Step
from routeprof.topology import ModelInfo

MAGIC = b"MBLT"
HEADER = 3
MOST_LAYERS, MOST_IDS = 1 << 14, 1 << 24
"""Of a model, and of a record, which is a pass of at most some thousand tokens."""

PHASES = (
    "phases are told by the tokens of a pass, as mbolt does: one is decode; several, of which the "
    "last layer has fewer, are prefill"
)
CUT = "the file is cut off within its last record, which is left out"
WARM_UP = "passes in which tokens go to every expert are llama.cpp's warm-up, and left out: "


def is_mbolt(path: Path) -> bool:
    """A file that begins with ``MBLT``."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_mbolt(paths: Sequence[Path]) -> Source:
    """The passes of one trace.

    Raises:
        UsageError: it is none, or damaged; a last record that is cut off is left out.
    """
    trace = _trace(one_of(paths))
    choices, fewer = trace.survey()
    found = layers_of(trace.path, choices, trace.experts, lambda index: f"blk.{index}")
    layers = tuple(replace(one, sees_all_tokens=one.index not in fewer) for one in found)
    notes = [PHASES]
    if trace.warm_up:
        notes.append(f"{WARM_UP}{trace.warm_up}")
    if trace.cut:
        notes.append(CUT)
    model = ModelInfo(engine="llama.cpp")
    return Source("mbolt", layers, trace.steps(max(choices)), "tokens", model, notes=tuple(notes))


@dataclass(frozen=True)
class _Trace:
    """Where the records of a stream are.

    Attributes:
        passes: offsets of records, by pass; those of warm-up are not among them.
        warm_up: passes that are.
        cut: the last record is not whole.
    """

    path: Path
    stream: NDArray[np.int32]
    experts: int
    passes: list[array[int]]
    warm_up: int
    cut: bool

    def survey(self) -> tuple[dict[int, int | None], set[int]]:
        """Experts of a token by layer, and layers that have fewer tokens than others of a pass."""
        choices: dict[int, int | None] = {}
        fewer: set[int] = set()
        for own in self.passes:
            tokens = {}
            for offset in own:
                layer, k, tokens[layer] = self.stream[offset : offset + 3].tolist()
                if choices.setdefault(layer, k) != k:
                    raise UsageError(
                        f"{self.path} has tokens with {choices[layer]} and with {k} experts in "
                        f"layer {layer}: pass a trace of one model"
                    )
            most = max(tokens.values())
            fewer |= {layer for layer, count in tokens.items() if count < most}
        return choices, fewer

    def steps(self, last: int) -> Iterator[Step]:
        for own in self.passes:
            ids = {}
            for offset in own:
                layer, k, tokens = self.stream[offset : offset + 3].tolist()
                values = self.stream[offset + 3 : offset + 3 + tokens * k].astype(np.int64)
                ids[layer] = within(values.reshape(tokens, k), self.experts)
            yield Step(ids=ids, phase=_phase({layer: len(one) for layer, one in ids.items()}, last))


def _phase(tokens: dict[int, int], last: int) -> str:
    """Phase of a pass, by the tokens of its layers."""
    most = max(tokens.values())
    if most == 1:
        return "decode"
    return "prefill" if tokens.get(last, most) < most else "unknown"


def _trace(path: Path) -> _Trace:
    stream = _opened(path)
    experts = int(stream[2])
    if not 1 <= experts <= MOST_EXPERTS:
        raise UsageError(f"{path} tells of {experts:,} experts, which cannot be: pass another copy")
    passes: list[array[int]] = []
    before, offset, widths = -1, HEADER, set()
    while offset + 3 <= len(stream):
        layer, k, tokens = stream[offset : offset + 3].tolist()
        if not (0 <= layer < MOST_LAYERS and 1 <= k <= experts and 1 <= tokens <= MOST_IDS // k):
            raise UsageError(
                f"{path} has no record of mbolt at byte {4 * offset}: pass another copy"
            )
        if offset + 3 + k * tokens > len(stream):
            break
        if layer <= before or not passes:
            passes.append(array("q"))
        passes[-1].append(offset)
        widths.add(k)
        before, offset = layer, offset + 3 + k * tokens
    cut = offset < len(stream) or path.stat().st_size % 4 != 0
    kept = passes
    if len(widths) > 1:  # llama.cpp warms up with all experts at once
        kept = [own for own in passes if any(stream[at + 1] != experts for at in own)]
    return _Trace(path, stream, experts, kept, len(passes) - len(kept), cut)


def _opened(path: Path) -> NDArray[np.int32]:
    """The stream, not read before it is asked for."""
    size = path.stat().st_size // 4
    if size < HEADER:
        raise UsageError(f"{path} ends within its header: pass a whole trace")
    stream = np.asarray(np.memmap(path, dtype="<i4", mode="r", shape=(size,)))
    if stream[:1].tobytes() != MAGIC or stream[1] != 1:
        raise UsageError(f"{path} is no trace of mbolt, version 1: pass another file")
    return stream
