"""What ``kernels`` does with many torch operators, as one Triton launch each, for CUDA devices.

Nothing here waits for the device, allocates, or lets the data decide what is launched: the grid
follows from shapes alone, so that a CUDA graph may capture every call. Importing this module
imports Triton, where there is one: import it only when the tensors are on a CUDA device (or when
TRITON_INTERPRET=1 lets the kernels run on the CPU).
"""

# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from routeprof.capture.kernels import StepConstants
from routeprof.capture.layout import BINS_PER_OCTAVE, GATE_SCALARS, GEMM_BUCKETS, Layout

try:
    import triton
    import triton.language as tl
except ImportError:  # the torch twin in ``kernels`` does the same, in more launches
    triton = tl = None

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus", "probabilities", "none")
"""How the router turns logits into scores; ``none`` leaves the logits alone."""

TILE, MAX_TILE_ROWS = 512, 32
"""Rows x experts that a program holds in registers at a time, and the most rows among them: few,
so that the rows of a decode step are spread over several multiprocessors."""

MAX_PROGRAMS = 256
"""A prefill has more rows than this many programs hold: they then take several tiles each, and
still write their sums once."""

OPTIONS = {"enable_fp_fusion": False}
"""Said aloud, because the default changes between Triton's versions, with a warning."""


def available() -> bool:
    """Whether Triton is installed."""
    return triton is not None


def _jit(*volatile: str) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit``, compiling once for all values (and alignments) of these arguments.

    Compiling again because a batch happens to be a multiple of 16 would stall the engine.
    """
    if triton is None:
        return lambda function: function
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=list(volatile))
    return decorate


def count_layer(
    step_row: Tensor,
    gate_row: Tensor | None,
    ids: Tensor,
    logits: Tensor | None,
    weights: Tensor | None,
    on: Tensor,
    rows: Tensor | None,
    valid: Tensor | None,
    offset: int,
    experts: int,
    top_k: int,
    scoring: str,
) -> None:
    """Add one layer call to its step row and gate row, in one launch.

    Row i counts if the switch is on, ``offset <= i < offset + rows``, and ``valid[i] > 0``;
    what is in the other rows is not read.

    Args:
        step_row: int64 [step_width], columns as in Layout; changed in place.
        gate_row: float64 [gate_width], columns as in ``Layout.gate_sections``; changed in place.
            None leaves the gate out.
        ids: integer [tokens, k], the experts that run; any value and any strides are allowed.
        logits: floating point [tokens, experts], the router's output, or None.
        weights: floating point [tokens, k], the combine weights. Without them the weights of this
            layer's experts become NaN.
        on: 0-dim int64; above 0 counts.
        rows: 0-dim int64, how many rows are real; None where all are.
        valid: int64 or bool [tokens]; None where all rows are real.
        offset: the first real row, below 0 where this rank holds a later part of them; unused
            without ``rows``.
        experts: number of experts of this layer.
        top_k: experts per token, for the margin p(k) - p(k+1).
        scoring: one of ``SCORINGS``, as in ``kernels.gate_statistics``.
    """
    tokens, choices = ids.shape
    if scoring not in SCORINGS:
        raise ValueError(f"scoring is {scoring!r}: pass one of {', '.join(SCORINGS)}")
    if gate_row is None:
        logits = weights = None
    if scoring == "none":
        logits = None
    if valid is not None and valid.dtype == torch.bool:
        valid = valid.view(torch.uint8)
    # The kernel would read past the end of a smaller tensor, and take the engine down.
    _expect("logits", logits, (tokens, experts))
    _expect("weights", weights, (tokens, choices))
    _expect("valid", valid, (tokens,))
    widest = step_row.shape[0] - 4
    if experts > widest or not step_row.is_contiguous():
        raise ValueError(f"a step row of {step_row.shape[0]} columns cannot hold {experts} experts")
    if gate_row is not None:
        _expect("gate_row", gate_row, (2 * widest + len(GATE_SCALARS),))
    block = triton.next_power_of_2(experts)
    tile_rows = min(MAX_TILE_ROWS, max(1, TILE // block))
    programs = max(1, min(MAX_PROGRAMS, triton.cdiv(tokens, tile_rows)))
    tensors = (step_row, gate_row, ids, logits, weights, on, rows, valid)
    strides = (*_strides(ids), *_strides(logits), *_strides(weights), *_strides(valid)[:1])
    shape = (widest, experts, choices, top_k, scoring, tile_rows, block)
    with torch.cuda.device_of(step_row):  # type: ignore[no-untyped-call]
        _count_layer[(programs,)](*tensors, offset, tokens, *strides, *shape, **OPTIONS)


def fold_steps(
    totals: Tensor,
    imbalance_max: Tensor,
    rows: Tensor,
    slots: Tensor,
    layout: Layout,
    constants: StepConstants,
) -> None:
    """Add what ``kernels.step_statistics`` says of each step to the totals of its slot.

    Args:
        totals: int64 [slots, layers, int_width], columns as in ``layout.sections``; changed in
            place.
        imbalance_max: float64 [slots, layers], the largest max / mean so far; changed in place.
        rows: int64 [steps, layers, step_width], step rows.
        slots: int64 [steps], one for each step.
    """
    steps, layers, width = rows.shape
    if not steps:
        return
    if not (rows.is_contiguous() and slots.is_contiguous()):
        raise ValueError("rows and slots are read as they lie: pass contiguous ones")
    # Ratios are not negative, and of such floats the larger has the larger bits.
    tensors = (totals, imbalance_max.view(torch.int64), rows, slots)
    factors = len(layout.capacity_factors)
    columns = [section.start for section in layout.sections.values()][1:]
    sizes = (width, layout.int_width, layout.imbalance_bins, GEMM_BUCKETS, factors)
    # No fewer columns than threads, or threads would hold the same ones, and count them twice.
    wide = max(128, triton.next_power_of_2(width))
    blocks = [wide, triton.next_power_of_2(GEMM_BUCKETS + 1), triton.next_power_of_2(factors)]
    with torch.cuda.device_of(totals):  # type: ignore[no-untyped-call]
        _fold_steps[(layers, steps)](
            *tensors,
            constants.experts,
            constants.capacity_numerator,
            constants.capacity_denominator,
            layers,
            BINS_PER_OCTAVE,
            *sizes,
            *columns,
            *blocks,
            num_warps=4 if wide <= 256 else 8,
            **OPTIONS,
        )


def _expect(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: pass {list(shape)}")


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()


# -- kernels. As is usual for Triton, capitals are what a kernel is compiled for.


@_jit(
    *"step_row gate_row ids logits weights on rows valid offset tokens".split(),
    *"ids_row logits_row weights_row valid_row".split(),
)
def _count_layer(
    step_row: tl.tensor,
    gate_row: tl.tensor,
    ids: tl.tensor,
    logits: tl.tensor,
    weights: tl.tensor,
    on: tl.tensor,
    rows: tl.tensor,
    valid: tl.tensor,
    offset: tl.tensor,
    tokens: tl.tensor,
    ids_row: tl.tensor,
    ids_column: tl.tensor,
    logits_row: tl.tensor,
    logits_column: tl.tensor,
    weights_row: tl.tensor,
    weights_column: tl.tensor,
    valid_row: tl.tensor,
    WIDEST: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program takes every so many-th tile [TILE_ROWS, BLOCK] of the real rows."""
    if tl.load(on) <= 0:
        return
    program = tl.program_id(0)
    begin = program * TILE_ROWS
    end = tokens
    if rows is not None:
        # Only real rows are visited: a padded bucket costs what its real rows cost.
        begin += tl.maximum(offset, 0)
        end = tl.minimum(tl.maximum(tl.load(rows) + offset, 0), tokens).to(tl.int32)
    if (program > 0) & (begin >= end):
        return
    experts = tl.arange(0, BLOCK)
    exists = experts < EXPERTS
    counts = tl.zeros([TILE_ROWS, BLOCK], tl.int32)
    mass = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
    weighed = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
    real = tl.zeros([TILE_ROWS], tl.int32)
    below = tl.zeros([TILE_ROWS], tl.int32)
    above = tl.zeros([TILE_ROWS], tl.int32)
    entropies = tl.zeros([TILE_ROWS], tl.float32)
    firsts = tl.zeros([TILE_ROWS], tl.float32)
    margins = tl.zeros([TILE_ROWS], tl.float32)
    squares = tl.zeros([TILE_ROWS], tl.float32)
    for start in range(begin, end, tl.num_programs(0) * TILE_ROWS):
        row = start + tl.arange(0, TILE_ROWS)
        keep = row < end
        row = row.to(tl.int64)
        if valid is not None:
            keep = keep & (tl.load(valid + row * valid_row, mask=keep, other=0) > 0)
        real += keep.to(tl.int32)
        for choice in tl.static_range(CHOICES):
            place = ids + row * ids_row + choice * ids_column
            chosen = tl.load(place, mask=keep, other=0).to(tl.int64)
            # Into range before the number is narrowed, which would wrap a large one around.
            chosen = tl.minimum(tl.maximum(chosen, -1), EXPERTS).to(tl.int32)
            chosen = tl.where(keep, chosen, -2)
            hit = experts[None, :] == chosen[:, None]
            counts += hit.to(tl.int32)
            below += (chosen == -1).to(tl.int32)
            above += (chosen == EXPERTS).to(tl.int32)
            if weights is not None:
                place = weights + row * weights_row + choice * weights_column
                weight = tl.load(place, mask=keep, other=0.0).to(tl.float32)
                weighed += tl.where(hit, weight[:, None], 0.0)
        if logits is not None:
            place = logits + row[:, None] * logits_row + experts[None, :] * logits_column
            here = keep[:, None] & exists[None, :]
            values = tl.load(place, mask=here, other=0.0).to(tl.float32)
            scores, square = _scores(values, exists[None, :], SCORING)
            entropy, first, margin = _terms(scores, exists[None, :], EXPERTS, TOP_K)
            mass += tl.where(here, scores, 0.0)
            entropies += tl.where(keep, entropy, 0.0)
            firsts += tl.where(keep, first, 0.0)
            margins += tl.where(keep, margin, 0.0)
            squares += tl.where(keep, square, 0.0)
    count = tl.sum(counts, axis=0).to(tl.int64)
    tokens_real = tl.sum(real, axis=0).to(tl.int64)
    tl.atomic_add(step_row + 1 + experts, count, mask=exists & (count > 0), sem="relaxed")
    tl.atomic_add(step_row, tl.sum(below, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(step_row + EXPERTS + 1, tl.sum(above, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(step_row + WIDEST + 2, tokens_real, sem="relaxed")
    if program == 0:
        tl.atomic_add(step_row + WIDEST + 3, tl.full([], 1, tl.int64), sem="relaxed")
    if gate_row is not None:
        section = gate_row + WIDEST + experts
        if weights is not None:
            sums = tl.sum(weighed, axis=0).to(tl.float64)
            tl.atomic_add(section, sums, mask=exists, sem="relaxed")
        elif program == 0:
            unknown = tl.full([BLOCK], float("nan"), tl.float64)
            tl.atomic_add(section, unknown, mask=exists, sem="relaxed")
    if logits is not None:
        sums = tl.sum(mass, axis=0).to(tl.float64)
        tl.atomic_add(gate_row + experts, sums, mask=exists, sem="relaxed")
        scalars = gate_row + 2 * WIDEST  # in the order of GATE_SCALARS
        tl.atomic_add(scalars, tl.sum(entropies, axis=0).to(tl.float64), sem="relaxed")
        tl.atomic_add(scalars + 1, tl.sum(firsts, axis=0).to(tl.float64), sem="relaxed")
        tl.atomic_add(scalars + 2, tl.sum(margins, axis=0).to(tl.float64), sem="relaxed")
        tl.atomic_add(scalars + 3, tl.sum(squares, axis=0).to(tl.float64), sem="relaxed")
        tl.atomic_add(scalars + 4, tokens_real.to(tl.float64), sem="relaxed")


@_jit()
def _log1p(values: tl.tensor) -> tl.tensor:
    """log(1 + values), exact for tiny values too: rounding 1 + values is put right again."""
    above = 1.0 + values
    gap = above - 1.0
    return tl.where(gap == 0.0, values, tl.log(above) * (values / tl.where(gap == 0.0, 1.0, gap)))


@_jit()
def _scores(
    values: tl.tensor, exists: tl.tensor, SCORING: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Normalised scores [rows, block], 0 beside the experts, and squared log-partition [rows]."""
    if SCORING == "probabilities":
        scores = tl.where(exists, values, 0.0)
        square = tl.sum(scores, axis=1) * float("nan")
    else:
        known = exists & (values == values)
        peak = tl.max(tl.where(known, values, float("-inf")), axis=1)
        peak = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
        powers = tl.where(exists, tl.exp(values - peak[:, None]), 0.0)
        partition = tl.sum(powers, axis=1)
        log_partition = peak + tl.log(partition)
        square = log_partition * log_partition
        if SCORING == "softmax":
            scores = powers / partition[:, None]
        else:
            if SCORING == "sigmoid":
                raw = 1.0 / (1.0 + tl.exp(-values))
            else:
                raw = tl.sqrt(tl.maximum(values, 0.0) + _log1p(tl.exp(-tl.abs(values))))
                raw = tl.where(values == values, raw, values)
            raw = tl.where(exists, raw, 0.0)
            scores = raw / tl.sum(raw, axis=1)[:, None]
    return scores, square


@_jit()
def _terms(
    scores: tl.tensor, exists: tl.tensor, EXPERTS: tl.constexpr, TOP_K: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Entropy, largest score and margin of each row [rows]; NaN is larger than any number."""
    # Smaller numbers count as 0: the device's logarithm may take them for 0, and say -inf.
    logs = tl.log(tl.where(scores > 1.2e-38, scores, 1.0))
    entropy = tl.sum(tl.where(scores < 0.0, float("-inf"), -scores * logs), axis=1)
    broken = entropy != entropy
    left = tl.where(scores == scores, scores, float("inf"))
    left = tl.where(exists, left, float("-inf"))
    first = tl.max(left, axis=1)
    margin = first * float("nan")
    if EXPERTS > TOP_K:
        # Take the largest score away, k + 1 times. Equal ones go together, so count them.
        seen = tl.zeros_like(first).to(tl.int32)
        chosen = first
        after = first
        for _place in range(TOP_K + 1):
            best = tl.max(left, axis=1)
            chosen = tl.where(seen < TOP_K, best, chosen)
            after = tl.where(seen <= TOP_K, best, after)
            same = left == best[:, None]
            seen += tl.sum(same.to(tl.int32), axis=1)
            left = tl.where(same, float("-inf"), left)
        margin = tl.where(broken & (chosen == float("inf")), float("nan"), chosen - after)
    return entropy, tl.where(broken, float("nan"), first), margin


@_jit("rows", "slots", "layers")
def _fold_steps(
    totals: tl.tensor,
    largest: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    layer_experts: tl.tensor,
    numerators: tl.tensor,
    denominators: tl.tensor,
    layers: tl.tensor,
    OCTAVE: tl.constexpr,
    WIDTH: tl.constexpr,
    INT_WIDTH: tl.constexpr,
    BINS: tl.constexpr,
    BUCKETS: tl.constexpr,
    FACTORS: tl.constexpr,
    MAX_LOAD: tl.constexpr,
    IMBALANCE: tl.constexpr,
    GEMM: tl.constexpr,
    OVERFLOW: tl.constexpr,
    OVERFLOW_STEPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDE: tl.constexpr,
    BUCKET_BLOCK: tl.constexpr,
    FACTOR_BLOCK: tl.constexpr,
) -> None:
    """A program for each layer and step; integer sums do not depend on their order."""
    layer = tl.program_id(0)
    step = tl.program_id(1).to(tl.int64)
    cell = tl.load(slots + step) * layers + layer
    into = totals + cell * INT_WIDTH
    experts = tl.load(layer_experts + layer)
    row = rows + (step * layers + layer) * WIDTH
    columns = tl.arange(0, WIDE)
    values = tl.load(row + columns, mask=columns < WIDTH, other=0)
    tokens = tl.load(row + WIDTH - 2)
    calls = tl.load(row + WIDTH - 1)
    tl.atomic_add(into + columns, values, mask=(columns < WIDTH) & (values != 0), sem="relaxed")

    is_expert = (columns >= 1) & (columns <= experts)
    counts = tl.where(is_expert, values, 0)
    max_load = tl.max(counts, axis=0)
    total = tl.sum(counts, axis=0)
    tl.atomic_add(into + MAX_LOAD, max_load, sem="relaxed")

    ratio = (max_load * experts).to(tl.float64) / tl.maximum(total, 1).to(tl.float64)
    octaves = tl.log2(tl.maximum(ratio, 1.0))
    # The small shift keeps exact powers of two in the bin that they open.
    place = (octaves * OCTAVE + tl.full([], 1e-9, tl.float64)).to(tl.int64)
    place = tl.minimum(place, BINS - 1)
    tl.atomic_add(into + IMBALANCE + place, tl.where(total > 0, tokens, 0), sem="relaxed")
    tl.atomic_max(largest + cell, ratio.to(tl.int64, bitcast=True), sem="relaxed")

    # The exponent of c as a float is floor(log2 c) + 1023; bucket 0 is c = 0.
    exponent = counts.to(tl.float64).to(tl.int64, bitcast=True) >> 52
    bucket = tl.maximum(exponent - 1022, 0).to(tl.int32)
    bucket = tl.where(is_expert & (calls > 0), bucket, BUCKETS)
    cells = tl.histogram(bucket, BUCKET_BLOCK).to(tl.int64)
    buckets = tl.arange(0, BUCKET_BLOCK)
    filled = (buckets < BUCKETS) & (cells > 0)
    tl.atomic_add(into + GEMM + buckets, cells, mask=filled, sem="relaxed")

    factors = tl.arange(0, FACTOR_BLOCK)
    wanted = factors < FACTORS
    numerator = tl.load(numerators + layer * FACTORS + factors, mask=wanted, other=0)
    denominator = tl.load(denominators + layer * FACTORS + factors, mask=wanted, other=1)
    capacity = (tokens * numerator + denominator - 1) // denominator
    over = tl.sum(tl.maximum(counts[None, :] - capacity[:, None], 0), axis=1)
    above = over > 0
    tl.atomic_add(into + OVERFLOW + factors, over, mask=above & wanted, sem="relaxed")
    steps = above.to(tl.int64)
    tl.atomic_add(into + OVERFLOW_STEPS + factors, steps, mask=above & wanted, sem="relaxed")
    tl.atomic_add(into + CAPACITY + factors, capacity * experts, mask=wanted, sem="relaxed")
