"""The range of expert weights, and what FP8, INT8 and INT4 would make of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import local

import numpy as np
import torch
from numpy.typing import NDArray

from routeprof.plan.audit.checkpoint import Source, opened
from routeprof.plan.audit.experts import Found, Matrix, Part, experts_of
from routeprof.plan.audit.groups import SCHEMES as OWN
from routeprof.plan.audit.groups import Sums
from routeprof.plan.audit.options import check_numbers
from routeprof.plan.audit.shared import FIXED, fixed_scales
from routeprof.plan.audit.strips import Reader

Floats = NDArray[np.float64]

SCHEMES = (*FIXED, *OWN)
"""From one scale for everything to one for each 128 elements."""

MOST_THREADS = 8

BUNDLE = 1 << 26
"""Bytes."""

ENOUGH = 1 << 16
"""Elements of a matrix to round: what that is good for is measured in ``docs/audit.md``."""

SPARSEST = 64


@dataclass(frozen=True)
class MatrixAudit:
    """One matrix of all experts of a layer; arrays are float64 [experts].

    Everything but ``broken`` is NaN for an expert with elements that are NaN or infinite.

    Attributes:
        layer, index, name, dtype: as in ``Matrix``.
        outputs, inputs: shape of an expert's matrix.
        largest: absolute maximum.
        rms: root mean square.
        outlier_share: share of elements beyond six times rms.
        broken: elements that are NaN or infinite.
        error, saturated, underflow: [schemes, experts], rows as SCHEMES. Root mean square of the
            rounding error ÷ rms; share of elements that round beyond the range; share that was
            not zero and becomes zero.
    """

    layer: str
    index: int
    name: str
    dtype: str
    outputs: int
    inputs: int
    largest: Floats
    rms: Floats
    outlier_share: Floats
    broken: NDArray[np.int64]
    error: Floats
    saturated: Floats
    underflow: Floats

    @property
    def experts(self) -> int:
        return len(self.largest)

    @property
    def outlier_ratio(self) -> Floats:
        """Absolute maximum ÷ rms: the crest factor."""
        return _ratio(self.largest, self.rms)

    def of(self, scheme: str) -> Floats:
        """The error under a scheme."""
        values: Floats = self.error[SCHEMES.index(scheme)]
        return values


@dataclass(frozen=True)
class Audit:
    """All matrices of a checkpoint.

    Attributes:
        sample: errors, shares and rms are of one in so many groups of 128; maxima of all elements.
        skipped: names of expert tensors that could not be audited, by the reason.
        read: bytes of the matrices.
    """

    source: Path
    matrices: tuple[MatrixAudit, ...]
    skipped: dict[str, list[str]]
    sample: int
    read: int


def audit(
    source: str | Path,
    *,
    sample: int = 1,
    threads: int | None = None,
    advance: Callable[[int], object] | None = None,
    found: Found | None = None,
) -> Audit:
    """Audit the expert weights of a safetensors checkpoint.

    Memory is bounded by a strip of 128 outputs or 4 MiB for each thread, and 256 KiB for each
    expert of a layer; for stacked tensors with outputs last by one expert's matrix for each thread.

    Args:
        source: a model's directory, or one file.
        sample: measure errors in one of so many groups of 128 inputs.
        threads: unset, one a processor, up to 8.
        advance: told the bytes that were read, as they are read.
        found: what ``experts_of`` has found, if it was called already.

    Raises:
        UsageError: no such checkpoint, a broken one, or one without experts to audit.
    """
    check_numbers(sample, threads)
    source = Path(source)
    found = found or experts_of(source)
    workers = threads or min(os.cpu_count() or 1, MOST_THREADS)
    told = advance or (lambda _: None)
    with opened() as files, _one_thread_an_operation(), ThreadPoolExecutor(workers) as pool:
        for matrix in found.matrices:
            for part in matrix.parts:
                files.open(part.tensor.file)
        try:
            matrices = tuple(_Crew(files, sample, pool, told).audit(found.matrices))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return Audit(source, matrices, found.skipped, sample, size_of(found))


def sample_for(found: Found) -> int:
    """One in how many groups to round, so that ENOUGH elements of every expert's matrix are."""
    smallest = min(one.parts[0].elements for one in found.matrices)
    return max(1, min(SPARSEST, smallest // ENOUGH))


def size_of(found: Found) -> int:
    """Bytes of all matrices to audit."""
    return sum(_bytes(part) for matrix in found.matrices for part in matrix.parts)


def _bytes(part: Part) -> int:
    return part.elements * part.tensor.nbytes // max(part.tensor.elements, 1)


class _Crew:
    """Threads with a reader each."""

    def __init__(
        self, files: Source, sample: int, pool: ThreadPoolExecutor, advance: Callable[[int], object]
    ) -> None:
        self._files, self._sample, self._pool, self._advance = files, sample, pool, advance
        self._own = local()

    def _reader(self) -> Reader:
        if not hasattr(self._own, "reader"):
            self._own.reader = Reader(self._files, self._sample)
        reader: Reader = self._own.reader
        return reader

    def audit(self, matrices: Sequence[Matrix]) -> Iterator[MatrixAudit]:
        """Read every expert of each matrix; what is next is read while one is summed up."""
        waiting = deque(self._begin(matrix) for matrix in matrices[:1])
        for number, matrix in enumerate(matrices, start=1):
            waiting.extend(self._begin(following) for following in matrices[number : number + 1])
            sums: list[Sums] = []
            for parts, some in zip(_bundles(matrix.parts), waiting.popleft(), strict=True):
                sums += some
                self._advance(sum(map(_bytes, parts)))
            yield _result(matrix, sums, self._reader())

    def _begin(self, matrix: Matrix) -> Iterator[list[Sums]]:
        return self._pool.map(lambda parts: self._reader().measure(parts), _bundles(matrix.parts))


def _bundles(parts: Sequence[Part]) -> list[Sequence[Part]]:
    """What a thread reads before it tells of it: as many parts as fit BUNDLE, at least one."""
    step = max(1, BUNDLE // max(_bytes(parts[0]), 1))
    return [parts[first : first + step] for first in range(0, len(parts), step)]


@contextmanager
def _one_thread_an_operation() -> Iterator[None]:
    """Operations on groups are too small to be shared out; experts are instead."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _result(matrix: Matrix, sums: Sequence[Sums], reader: Reader) -> MatrixAudit:
    first = matrix.parts[0]
    broken = np.array([one.broken for one in sums], dtype=np.int64)
    largest = np.array([one.largest for one in sums])
    largest[broken > 0] = np.nan
    fixed = fixed_scales(matrix.parts, sums, largest, reader)
    square = np.array([one.square for one in sums])
    seen = np.array([one.seen for one in sums])
    lost = np.concatenate((fixed.lost, np.stack([one.lost for one in sums], axis=1)))
    kept = np.concatenate((fixed.kept, np.stack([one.kept for one in sums], axis=1)))
    present = np.array([one.present for one in sums])
    saturated = np.concatenate((fixed.saturated, np.zeros((len(OWN), len(sums)))))
    hidden = np.where(broken > 0, np.nan, 1.0)
    return MatrixAudit(
        matrix.layer,
        matrix.index,
        matrix.name,
        matrix.dtype,
        first.outputs,
        first.inputs,
        largest,
        rms=np.sqrt(_ratio(square, seen)) * hidden,
        outlier_share=_ratio(fixed.outliers, seen) * hidden,
        broken=broken,
        error=np.sqrt(_ratio(lost, square)) * hidden,
        saturated=_ratio(saturated, seen) * hidden,
        underflow=_ratio(present - kept, seen) * hidden,
    )


def _ratio(above: Floats, below: Floats) -> Floats:
    """NaN where nothing is below: an expert of zeros has no relative error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, np.nan)
