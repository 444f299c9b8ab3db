"""Layer calls and step rows for the fused kernels, and what each of them must add up to.

Twice: by the torch twin in ``kernels``, and by hand, one assignment at a time in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch import Tensor

from routeprof.capture import fused, kernels
from routeprof.capture.kernels import StepConstants
from routeprof.capture.layout import BINS_PER_OCTAVE, GATE_SCALARS, Layout
from routeprof.topology import Layer

ID_TYPES = (torch.int16, torch.int32, torch.int64)
LOGIT_TYPES = (torch.float16, torch.bfloat16, torch.float32)
EXPERTS = (1, 2, 5, 6, 8, 60, 64, 128, 160, 256)
STEP_START, GATE_START = 7, 0.25
"""What the rows hold before: the kernel adds, and touches nothing beside its columns."""

Sums = tuple[np.ndarray, np.ndarray | None]
"""A step row and a gate row."""


@dataclass
class Call:
    """One layer call, in the words of ``fused.count_layer``; ``widest`` is the layout's experts."""

    ids: Tensor
    logits: Tensor | None
    weights: Tensor | None
    on: Tensor
    rows: Tensor | None
    valid: Tensor | None
    offset: int
    experts: int
    top_k: int
    scoring: str
    widest: int
    gate: bool = True

    def counting(self) -> np.ndarray:
        """Which rows count, bool [tokens]."""
        place = np.arange(len(self.ids))
        keep = np.full(len(place), int(self.on) > 0)
        if self.rows is not None:
            keep &= (place >= self.offset) & (place < self.offset + int(self.rows))
        if self.valid is not None:
            keep &= self.valid.cpu().numpy() > 0
        return keep


def random_call(random: np.random.Generator, device: str = "cpu", **fixed) -> Call:
    """Any call; ``fixed`` holds what must not be left to chance.

    Rows that do not count hold ids that are no experts, and NaN.
    """

    def draw(name: str, *options):
        return fixed[name] if name in fixed else options[random.integers(len(options))]

    experts, tokens = draw("experts", *EXPERTS), draw("tokens", 0, 1, 2, 7, 33, 64)
    choices = draw("choices", *range(1, min(8, experts) + 1))
    on = draw("on", 1, 1, 1, 1, 2, 0, -1)
    rows = draw("rows", None, 0, tokens, tokens + 3, int(random.integers(tokens + 1)))
    offset = draw("offset", 0, 0, -2, 3, int(random.integers(tokens + 1)))
    valid = draw("valid", None, torch.int64, torch.bool)
    scoring = draw("scoring", *fused.SCORINGS)
    call = Call(
        ids=torch.zeros(tokens, choices),
        logits=None,
        weights=None,
        on=torch.tensor(on, device=device),
        rows=None if rows is None else torch.tensor(rows, device=device),
        valid=None,
        offset=offset,
        experts=experts,
        top_k=draw("top_k", choices),
        scoring=scoring,
        widest=experts + draw("spare", 0, 0, 1, 7),
        gate=draw("gate", True, True, True, False),
    )
    if valid is not None:
        call.valid = torch.from_numpy(random.integers(0, 2, tokens)).to(device, valid)
    padding = ~call.counting()[:, None]
    dtype = draw("id_type", *ID_TYPES)
    ids = _some_ids(random, (tokens, choices), experts, dtype)
    ids[padding.repeat(choices, 1)] = torch.iinfo(dtype).max
    call.ids = _lay(random, torch.from_numpy(ids).to(device, dtype))
    if draw("logits", True, True, True, False):
        logits = _some_logits(random, (tokens, experts), scoring, draw("ties", False, False, True))
        logits = torch.from_numpy(np.where(padding, np.nan, logits))
        call.logits = _lay(random, logits.to(device, draw("logit_type", *LOGIT_TYPES)))
    if draw("weights", True, True, True, False):
        weights = torch.from_numpy(np.where(padding, np.nan, random.random((tokens, choices))))
        call.weights = _lay(random, weights.to(device, draw("weight_type", *LOGIT_TYPES)))
    return call


def _some_ids(random, shape, experts: int, dtype: torch.dtype) -> np.ndarray:
    ids = random.integers(0, experts, shape)
    limits = torch.iinfo(dtype)
    wrong = np.array([-1, -2, experts, experts + 1, limits.min, limits.max])
    # 2**32 + 1 would be expert 1 in 32 bits.
    wrong = np.append(wrong, 2**32 + 1 if dtype == torch.int64 else -1)
    return np.where(random.random(shape) < 0.2, random.choice(wrong, shape), ids)


def _some_logits(random, shape, scoring: str, ties: bool) -> np.ndarray:
    scale = random.choice([0.5, 4.0, 60.0 if scoring == "softmax" else 10.0])
    logits = random.normal(size=shape) * scale
    if ties:
        logits = np.round(logits / scale)
    if scoring == "probabilities":
        powers = np.exp(logits - logits.max(1, initial=-np.inf, keepdims=True))
        return powers / powers.sum(1, keepdims=True)
    return logits


def _lay(random, matrix: Tensor) -> Tensor:
    """The same matrix, one time in two with other strides."""
    way = random.integers(4)
    if way == 0:
        return matrix.T.contiguous().T
    if way == 1:
        wide = matrix.new_zeros(matrix.shape[0], 2 * matrix.shape[1] + 1)
        wide[:, 1::2] = matrix
        return wide[:, 1::2]
    return matrix


def check_call(call: Call, *, by_hand: bool = True) -> None:
    """The kernel adds what the twin and counting by hand do."""
    found = by_kernel(call)
    for wanted in [by_twin(call)] + [counted_by_hand(call)] * by_hand:
        np.testing.assert_array_equal(found[0], wanted[0])
        if found[1] is not None:
            np.testing.assert_allclose(found[1], wanted[1], rtol=3e-4, atol=1e-4)


def empty_rows(call: Call) -> tuple[Tensor, Tensor | None]:
    device, widest = call.ids.device, call.widest
    step_row = torch.full((widest + 4,), STEP_START, dtype=torch.int64, device=device)
    gate_row = None
    if call.gate:
        width = 2 * widest + len(GATE_SCALARS)
        gate_row = torch.full((width,), GATE_START, dtype=torch.float64, device=device)
    return step_row, gate_row


def by_kernel(call: Call) -> Sums:
    step_row, gate_row = empty_rows(call)
    what = (call.ids, call.logits, call.weights, call.on, call.rows, call.valid, call.offset)
    fused.count_layer(step_row, gate_row, *what, call.experts, call.top_k, call.scoring)
    return step_row.cpu().numpy(), None if gate_row is None else gate_row.cpu().numpy()


def by_twin(call: Call) -> Sums:
    step_row, gate_row = empty_rows(call)
    keep = torch.from_numpy(call.counting()).to(call.ids.device)
    source = keep[:, None].expand(call.ids.shape).reshape(-1).long()
    kernels.count_ids(step_row, call.ids, source, call.experts)
    step_row[-2] += keep.sum()
    step_row[-1] += (call.on > 0).long()
    if gate_row is None:
        return step_row.cpu().numpy(), None
    if call.logits is not None and call.scoring != "none":
        router = "softmax" if call.scoring == "probabilities" else call.scoring
        mass, scalars = kernels.gate_statistics(
            call.logits, keep, router, call.top_k, call.scoring == "probabilities"
        )
        gate_row[: call.experts] += mass
        gate_row[-len(scalars) :] += scalars
    weighed = gate_row[call.widest : call.widest + call.experts]
    if call.weights is not None:
        weighed += kernels.weight_sums(call.weights, call.ids, keep, call.experts)
    elif call.on > 0:
        weighed += torch.nan
    return step_row.cpu().numpy(), gate_row.cpu().numpy()


def counted_by_hand(call: Call) -> Sums:
    step_row, gate_row = (None if row is None else row.cpu().numpy() for row in empty_rows(call))
    rows = np.flatnonzero(call.counting())
    ids = call.ids.cpu().numpy()
    step_row[-2] += len(rows)
    step_row[-1] += int(call.on) > 0
    weights = None if call.weights is None else call.weights.double().cpu().numpy()
    if gate_row is not None and weights is None and call.on > 0:
        gate_row[call.widest : call.widest + call.experts] = np.nan
    for row in rows:
        for choice, expert in enumerate(ids[row].tolist()):
            step_row[min(max(expert, -1), call.experts) + 1] += 1
            if gate_row is not None and weights is not None and 0 <= expert < call.experts:
                gate_row[call.widest + expert] += weights[row, choice]
    if gate_row is not None and call.logits is not None and call.scoring != "none":
        logits = call.logits.double().cpu().numpy()
        for row in rows:
            _add_gate(gate_row, call, logits[row])
    return step_row, gate_row


def _add_gate(gate_row: np.ndarray, call: Call, logits: np.ndarray) -> None:
    peak = logits.max()
    log_partition = peak + np.log(np.exp(logits - peak).sum())
    if call.scoring == "probabilities":
        scores, log_partition = logits, np.nan
    elif call.scoring == "softmax":
        scores = np.exp(logits - log_partition)
    else:
        raw = np.logaddexp(0, logits) ** 0.5 if call.scoring == "sqrtsoftplus" else 0
        raw = 1 / (1 + np.exp(-logits)) if call.scoring == "sigmoid" else raw
        scores = raw / raw.sum()
    sorted_scores = sorted(scores.tolist(), reverse=True)
    entropy = -sum(score * np.log(score) for score in sorted_scores if score > 0)
    margin = np.nan
    if call.top_k < call.experts:
        margin = sorted_scores[call.top_k - 1] - sorted_scores[call.top_k]
    gate_row[: call.experts] += scores
    gate_row[2 * call.widest :] += [entropy, sorted_scores[0], margin, log_partition**2, 1]


# -- folding


def layout_of(*shapes: tuple[int, int], **facts) -> Layout:
    """A layout of layers with these (experts, top_k)."""
    layers = [
        Layer(place, f"layers.{place}.mlp", experts=experts, top_k=top_k)
        for place, (experts, top_k) in enumerate(shapes)
    ]
    return Layout(tuple(layers), **facts)


def random_rows(random: np.random.Generator, layout: Layout, steps: int) -> np.ndarray:
    """Step rows int64 [steps, layers, step_width]: silent layers, collapses, invalid ids."""
    rows = np.zeros((steps, len(layout.layers), layout.step_width), np.int64)
    for step in rows:
        for row, layer in zip(step, layout.layers, strict=True):
            tokens = int(random.choice([0, 1, 16, 100, 4096]))
            skew = random.choice([0.05, 1.0, 100.0])
            spread = random.dirichlet(np.full(layer.experts, skew))
            way = random.integers(6)
            if way == 0:
                continue
            if way == 1:  # everything to 2**n experts, an exact power of two out of balance
                spread = np.zeros(layer.experts)
                busy = 2 ** random.integers(layer.experts.bit_length())
                spread[:busy] = 1 / busy
            assignments = tokens * layer.top_k * (way != 2)
            counts = random.multinomial(assignments, spread)
            if way == 1:
                counts = np.where(spread > 0, tokens, 0)
            row[1 : layer.experts + 1] = counts
            row[0], row[layer.experts + 1] = random.integers(0, 5, 2)
            row[-2:] = tokens, random.integers(1, 3)
    return rows


def check_fold(layout: Layout, rows: np.ndarray, slots: np.ndarray, device: str = "cpu") -> None:
    """The kernel adds what the twin and adding by hand do."""
    constants = StepConstants(layout, torch.device(device))
    shape = (layout.slots, len(layout.layers), layout.int_width)
    before = torch.arange(np.prod(shape), device=device).reshape(shape) % 1000
    largest = torch.zeros(shape[:2], dtype=torch.float64, device=device)
    largest[::2] = 1.5
    totals, maxima = before.clone(), largest.clone()
    given = torch.from_numpy(rows).to(device), torch.from_numpy(slots).to(device)
    fused.fold_steps(totals, maxima, *given, layout, constants)
    twin, twin_maxima = before.clone(), largest.clone()
    for step, slot in zip(given[0], slots, strict=True):
        statistics, ratio = kernels.step_statistics(step[None], layout, constants)
        twin[slot] += statistics
        twin_maxima[slot] = torch.maximum(twin_maxima[slot], ratio)
    hand, hand_maxima = before.cpu().numpy(), largest.cpu().numpy()
    for step, slot in zip(rows, slots, strict=True):
        for position in range(len(layout.layers)):
            add_step(hand[slot, position], hand_maxima[slot], layout, step, position)
    for wanted, wanted_maxima in ((twin.cpu(), twin_maxima.cpu()), (hand, hand_maxima)):
        for name, section in layout.sections.items():
            found = totals.cpu()[..., section]
            np.testing.assert_array_equal(found, wanted[..., section], name)
        np.testing.assert_array_equal(maxima.cpu(), wanted_maxima)


def add_step(into: np.ndarray, largest: np.ndarray, layout: Layout, step, position: int) -> None:
    row, layer, sections = step[position], layout.layers[position], layout.sections
    counts = [int(count) for count in row[1 : layer.experts + 1]]
    tokens, calls = (int(number) for number in row[-2:])
    into[sections["row"]] += row
    into[sections["max_load"]] += max(counts)
    if sum(counts):
        peak = max(counts) * layer.experts
        largest[position] = max(largest[position], peak / sum(counts))
        into[sections["imbalance"]][min(_bin(peak, sum(counts)), layout.imbalance_bins - 1)] += (
            tokens
        )
    for count in counts if calls else ():
        into[sections["gemm"]][count.bit_length()] += 1
    for place, factor in enumerate(layout.factors):
        capacity = ceil(factor * tokens * layer.top_k / layer.experts)
        over = sum(max(0, count - capacity) for count in counts)
        into[sections["overflow"]][place] += over
        into[sections["overflow_steps"]][place] += over > 0
        into[sections["capacity"]][place] += capacity * layer.experts


def _bin(numerator: int, denominator: int) -> int:
    """floor(32 · log2(numerator / denominator)) of a ratio from 1 on, in whole numbers."""
    numerator, denominator = numerator**BINS_PER_OCTAVE, denominator**BINS_PER_OCTAVE
    guess = numerator.bit_length() - denominator.bit_length()
    return guess - (numerator < denominator << guess)
