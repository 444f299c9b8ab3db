"""What is computed on the device, as plain torch operators.

Every function here runs in the engine's forward pass: fixed output shapes, no host
synchronisation, no data-dependent branch, so that it works under torch.compile, CUDA-graph
capture and FakeTensorMode alike.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from routeprof.capture.layout import BINS_PER_OCTAVE, GEMM_BUCKETS, Layout
from routeprof.topology import Layer, RouterKind

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels on the CPU: slowly, for tests."""


def fused_for(ids: Tensor) -> bool:
    """Whether the Triton kernels serve this tensor; a compiler fuses the others by itself."""
    served = ids.device.type == "cuda" or INTERPRETED
    return served and not torch.compiler.is_compiling() and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def scoring(layer: Layer) -> str:
    """How the fused kernel is to read a layer's logits: a router kind, or none."""
    return layer.router if layer.gate == "logits" else layer.gate


def count_ids(step_row: Tensor, ids: Tensor, source: Tensor, experts: int) -> None:
    """Add one layer call to its step row.

    Args:
        step_row: int64 [width], columns as in Layout; changed in place.
        ids: integer [tokens, k], the experts that run; any value is allowed.
        source: int64 [tokens * k] or 0-dim; 1 counts, 0 does not (padding, switched off).
        experts: number of experts of this layer.
    """
    shifted = torch.clamp(ids.reshape(-1).long(), -1, experts).add_(1)
    step_row.scatter_add_(0, shifted, source.expand(shifted.shape))


def gate_statistics(
    logits: Tensor, keep: Tensor | None, router: RouterKind, top_k: int, probabilities: bool
) -> tuple[Tensor, Tensor]:
    """Sums of the gate's outputs over tokens.

    Args:
        logits: [..., tokens, experts], the router's output.
        keep: bool [..., tokens]; False leaves a token out. None keeps all.
        router: how logits become scores; sigmoid-like scores are normalised over experts.
        top_k: experts per token, for the margin p(k) - p(k+1).
        probabilities: the router handed out probabilities: they are used as they are.

    Returns:
        mass [..., experts] and scalars [..., 5] in the order of ``layout.GATE_SCALARS``. The
        z term is NaN where there are no logits, the margin where every expert is chosen.
    """
    scores, entropy, z = _scores(logits.float(), router, probabilities)
    terms = torch.stack(
        [entropy, scores.amax(-1), _margin(scores, top_k), z, torch.ones_like(z)], dim=-1
    )
    if keep is not None:
        # A padding row may hold NaN, and NaN * 0 is NaN: select, then add.
        scores = torch.where(keep[..., None], scores, 0.0)
        terms = torch.where(keep[..., None], terms, 0.0)
    return scores.sum(-2), terms.sum(-2)


def _margin(scores: Tensor, top_k: int) -> Tensor:
    """Score of the last choice minus that of the first expert not chosen, [...]."""
    experts = scores.shape[-1]
    if experts <= top_k:
        return torch.full_like(scores[..., 0], torch.nan)
    if type(scores) is Tensor and scores.device.type == "cpu" and not torch.compiler.is_compiling():
        # A selection costs a fifth of torch's topk there. Both call NaN the largest of all.
        parted = np.partition(scores.detach().numpy(), experts - top_k - 1)
        last = np.fmin.reduce(parted[..., experts - top_k :], axis=-1)
        return torch.from_numpy(np.asarray(last - parted[..., experts - top_k - 1]))
    best = scores.topk(top_k + 1, dim=-1).values
    return best[..., -2] - best[..., -1]


def _scores(
    logits: Tensor, router: RouterKind, probabilities: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised scores [..., experts], their entropy and the squared log-partition [...]."""
    if probabilities:
        return logits, _entropy(logits), torch.full_like(logits[..., 0], torch.nan)
    log_partition = logits.logsumexp(-1)
    z = log_partition.square()
    if router == "softmax":
        logs = logits - log_partition[..., None]
        scores = torch.exp(logs)
        # Of an expert that is masked out, 0 · log 0 is 0; the bound is below any float's log.
        return scores, -(scores * logs.clamp(min=-200.0)).sum(-1), z
    raw = logits.sigmoid() if router == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    scores = raw / raw.sum(-1, keepdim=True)
    return scores, _entropy(scores), z


def _entropy(scores: Tensor) -> Tensor:
    terms: Tensor = torch.special.entr(scores)
    return terms.sum(-1)


def weight_sums(weights: Tensor, ids: Tensor, keep: Tensor | None, experts: int) -> Tensor:
    """Combine weight that each expert received, [experts]; ids and weights are [tokens, k]."""
    weights = weights.float()
    if keep is not None:
        weights = torch.where(keep[:, None], weights, 0.0)
    shifted = torch.clamp(ids.reshape(-1).long(), -1, experts).add_(1)
    sums = torch.zeros(experts + 2, dtype=torch.float32, device=weights.device)
    return sums.scatter_add_(0, shifted, weights.reshape(-1))[1 : experts + 1]


class StepConstants:
    """Per-layer constants on the device that step statistics need."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        experts = [layer.experts for layer in layout.layers]
        top_k = [layer.choices for layer in layout.layers]
        self.experts = torch.tensor(experts, device=device)
        self.top_k = torch.tensor(top_k, device=device)
        numerators = torch.tensor([f.numerator for f in layout.factors], device=device)
        denominators = torch.tensor([f.denominator for f in layout.factors], device=device)
        # capacity = ceil(factor · tokens · k / experts), in whole numbers.
        self.capacity_numerator = numerators[None, :] * self.top_k[:, None]
        self.capacity_denominator = denominators[None, :] * self.experts[:, None]
        exists = torch.arange(layout.experts, device=device)[None, :] < self.experts[:, None]
        self.exists = exists.long()


def step_statistics(
    rows: Tensor, layout: Layout, constants: StepConstants
) -> tuple[Tensor, Tensor]:
    """What must be known per step, because sums over steps no longer tell it.

    Args:
        rows: int64 [steps, layers, width], step rows.

    Returns:
        int64 [layers, int_width], columns as in ``layout.sections``, summed over the steps; and
        the largest max / mean load of any step, float64 [layers] (0 where a layer saw nothing).
    """
    counts = rows[..., 1 : layout.experts + 1] * constants.exists
    tokens = rows[..., layout.tokens_column]
    called = rows[..., layout.calls_column].clamp(max=1)
    max_load = counts.amax(-1)
    total = counts.sum(-1)
    ratio = max_load * constants.experts / total.clamp(min=1).double()
    overflow, capacity = _overflow(counts, tokens, layout, constants)
    pieces = [
        rows.sum(0),
        max_load.sum(0)[:, None],
        _imbalance_histogram(ratio, torch.where(total > 0, tokens, 0), layout),
        _gemm_histogram(counts, called, constants),
        overflow.sum(0),
        (overflow > 0).sum(0),
        capacity.sum(0),
    ]
    return torch.cat(pieces, dim=-1), ratio.amax(0)


def _imbalance_histogram(ratio: Tensor, weight: Tensor, layout: Layout) -> Tensor:
    """Tokens by imbalance bin, [layers, bins]; ratio and weight are [steps, layers]."""
    octaves = torch.log2(ratio.clamp(min=1.0))
    # The small shift keeps exact powers of two in the bin that they open.
    bins = (octaves * BINS_PER_OCTAVE + 1e-9).long().clamp(max=layout.imbalance_bins - 1)
    histogram = weight.new_zeros(weight.shape[1], layout.imbalance_bins)
    return histogram.scatter_add_(1, bins.T, weight.T)


def _gemm_histogram(counts: Tensor, called: Tensor, constants: StepConstants) -> Tensor:
    """Experts by the size of their GEMM in each step, [layers, buckets].

    Args:
        counts: [steps, layers, experts]; called: [steps, layers], 1 where the layer ran.
    """
    # The exponent of c as a float is floor(log2 c) + 1023: no comparison with each power of two.
    exponent = counts.double().view(torch.int64) >> 52
    buckets = (exponent - 1022).clamp(min=0)
    source = constants.exists * called[..., None]
    layers = counts.shape[1]
    histogram = counts.new_zeros(layers, GEMM_BUCKETS)
    return histogram.scatter_add_(
        1,
        buckets.transpose(0, 1).reshape(layers, -1),
        source.transpose(0, 1).reshape(layers, -1),
    )


def _overflow(
    counts: Tensor, tokens: Tensor, layout: Layout, constants: StepConstants
) -> tuple[Tensor, Tensor]:
    """Assignments above capacity and slots paid for, both [steps, layers, factors]."""
    scaled = tokens[..., None] * constants.capacity_numerator
    denominator = constants.capacity_denominator
    capacity = torch.div(scaled + denominator - 1, denominator, rounding_mode="floor")
    over = [
        (counts - capacity[..., factor : factor + 1]).clamp(min=0).sum(-1)
        for factor in range(len(layout.capacity_factors))
    ]
    return torch.stack(over, dim=-1), capacity * constants.experts[:, None]
