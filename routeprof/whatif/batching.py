"""What batches composed otherwise would bring: first come first served, at random, by routing.

The same requests are put into batches three ways, and what their steps would have been is counted
from what was recorded of each. A mixture-of-experts layer routes a token by itself, so that a
request takes the same experts in any company; only their sums change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routeprof.errors import UsageError
from routeprof.metrics._arrays import FloatArray, IntArray, require_positive
from routeprof.whatif.requests.batch_steps import Waits, added, waits
from routeprof.whatif.requests.compose import fifo, load_aware, shuffled
from routeprof.whatif.requests.gain import Gain, gain
from routeprof.whatif.requests.served import Requests, served_requests
from routeprof.whatif.requests.signatures import (
    Signatures,
    expected_by_class,
    expected_by_prefill,
    signatures,
)

if TYPE_CHECKING:
    from routeprof.profile import Profile

USUAL_SIZES = (8, 16, 32)
RANDOM_ORDERS = 20


@dataclass(frozen=True)
class PolicyFigures:
    """Figures of one way to compose batches; definitions in ``docs/metrics.md``.

    Attributes:
        policy: ``fifo``, ``random`` (the mean of several orders) or ``load_aware``.
        requests: how many are in its batches; the same ones for every policy of a size.
        batches, steps: how many there are; steps of random orders are a mean.
        imbalance_ratio: max ÷ mean load of experts, mean over steps and layers by their tokens.
        straggler_factor: Σ largest ÷ Σ mean rank load over steps and layers.
        tokens_per_expert_mean, tokens_per_expert_median: over (expert, step) cells with tokens.
        small_gemm_share: share of these cells with fewer than 16 tokens.
        gains: FIFO's imbalance ratio and straggler factor ÷ its own, by name; None for FIFO itself,
            and where there is a single batch to fill, so that nothing can be gained.
    """

    policy: str
    batch_size: int
    requests: int
    batches: int
    steps: float
    imbalance_ratio: float
    straggler_factor: float
    tokens_per_expert_mean: float
    tokens_per_expert_median: float
    small_gemm_share: float
    gains: dict[str, Gain] | None


@dataclass(frozen=True)
class Batching:
    """Ways to compose batches, compared.

    Attributes:
        known_by: what load-aware composition knew of a request: ``tag``, ``prefill``, or None where
            nothing tells requests apart before they run, and there is no such composition.
        requests: all that the recording knows whole; ``left_out`` those of which it does not.
        blind: indices of layers left out: they do not know whose their tokens are.
        policies: one for each batch size and policy.
    """

    phase: str
    ranks: int
    known_by: str | None
    requests: int
    left_out: int
    blind: tuple[int, ...]
    policies: tuple[PolicyFigures, ...]
    signatures: Signatures


def compare_batching(
    profile: Profile,
    batch_sizes: Sequence[int] | None = None,
    *,
    ranks: int,
    phase: str = "decode",
    seed: int = 0,
    orders: int = RANDOM_ORDERS,
) -> Batching:
    """Compose batches of a recording's requests three ways, and compare what they would have run.

    Args:
        profile: of level tokens; a tag and a time may be selected, a phase must not be.
        batch_sizes: requests in a batch; unset, those of ``USUAL_SIZES`` that the requests allow.
        ranks: expert-parallel ranks, experts dealt to them in order.
        phase: ``decode``: batches run in lockstep, a token of each request in a step; ``prefill``:
            the whole prefills of a batch are one step.
        seed: of the random orders and the bootstrap.
        orders: how many random orders there are.

    Raises:
        LevelRequiredError: the recording has no tokens.
        UsageError: no tokens of the phase, more ranks than experts, or fewer requests than a batch.
    """
    return compare_requests(
        served_requests(profile, phase), batch_sizes, ranks=ranks, seed=seed, orders=orders
    )


def compare_requests(
    requests: Requests,
    batch_sizes: Sequence[int] | None = None,
    *,
    ranks: int,
    seed: int = 0,
    orders: int = RANDOM_ORDERS,
) -> Batching:
    """`compare_batching` of requests that are at hand; arguments and errors are the same."""
    require_positive(orders=orders)
    known_by = _known_by(requests)
    folds = _folds(requests, known_by)
    fitted = [_expected(requests, known_by, fit, judged, ranks) for fit, judged in folds]
    parts = [
        (judged, expected) for (_, judged), expected in zip(folds, fitted, strict=True)
    ]  # from here on what was fitted on is out of sight
    sizes = _sizes(batch_sizes, min(len(judged) for judged, _ in parts), known_by)
    random = np.random.default_rng(seed)
    return Batching(
        phase=requests.phase,
        ranks=ranks,
        known_by=known_by,
        requests=len(requests.names),
        left_out=requests.left_out,
        blind=requests.blind,
        policies=tuple(
            figures
            for size in sizes
            for figures in _of_size(requests, parts, size, ranks, orders, random)
        ),
        signatures=signatures(requests),
    )


# -- what may be known, and of whom


def _known_by(requests: Requests) -> str | None:
    if len(set(requests.classes)) > 1:
        return "tag"
    seen = any(one.prefill.any() for one in requests.layers)
    return "prefill" if requests.phase == "decode" and seen else None


def _folds(requests: Requests, known_by: str | None) -> list[tuple[IntArray, IntArray]]:
    """Requests to fit signatures on, and others to judge them by; each is judged once.

    Signatures of a tag are fitted on every other request of it, in the order of arrival, and judged
    on the rest, then the other way round. A prefill is no part of the decode that it is judged by.
    """
    everyone = np.arange(len(requests.names))
    if known_by != "tag":
        return [(everyone[:0], everyone)]
    half = np.zeros(len(everyone), dtype=np.int64)
    for number, name in enumerate(sorted(set(requests.classes))):
        places = np.flatnonzero(np.array(requests.classes, dtype=object) == name)
        half[places] = (np.arange(len(places)) + number) % 2
    return [(everyone[half != part], everyone[half == part]) for part in (0, 1)]


def _expected(
    requests: Requests, known_by: str | None, fit: IntArray, judged: IntArray, ranks: int
) -> FloatArray | None:
    if known_by is None:
        return None
    if known_by == "tag":
        return expected_by_class(requests, fit, judged, ranks)
    return expected_by_prefill(requests, judged, ranks)


def _sizes(asked: Sequence[int] | None, most: int, known_by: str | None) -> list[int]:
    whose = "each half (signatures are fitted on one)" if known_by == "tag" else "the selection"
    if asked is not None and min(asked, default=0) < 1:
        raise UsageError(f"batch sizes {list(asked)}: pass whole numbers of 1 or more")
    sizes = sorted(set(asked if asked is not None else USUAL_SIZES))
    if asked is None:
        sizes = [size for size in sizes if size <= most] or sizes[:1]
    if sizes[-1] > most:
        raise UsageError(
            f"batch size {sizes[-1]} is more than the {most} requests in {whose}: pass {most} or "
            "less, or record more requests"
            if most
            else "two requests or more are needed: record more requests"
        )
    return sizes


# -- figures

_Part = tuple[IntArray, FloatArray | None]


def _of_size(
    requests: Requests,
    parts: list[_Part],
    size: int,
    ranks: int,
    orders: int,
    random: np.random.Generator,
) -> list[PolicyFigures]:
    """All policies, of the same requests in full batches; the last that fill none are left out."""
    kept = [len(judged) // size * size for judged, _ in parts]
    members = [judged[:number] for (judged, _), number in zip(parts, kept, strict=True)]

    def run(composed: list[IntArray], repeats: int = 1) -> Waits:
        each = [waits(requests, batches, ranks) for batches in composed]
        return added(each, sum(one.steps for one in each) / repeats)

    ran = {"fifo": run([fifo(own, size) for own in members])}
    mixed = [shuffled(own, size, random) for _ in range(orders) for own in members]
    ran["random"] = run(mixed, orders)
    if parts[0][1] is not None:
        ran["load_aware"] = run(
            [
                load_aware(own, expected[: len(own)], size)
                for own, (_, expected) in zip(members, parts, strict=True)
                if expected is not None
            ]
        )
    everyone = np.sort(np.concatenate(members))
    classes = [requests.classes[place] for place in everyone]
    single, first = max(kept) == size, ran["fifo"]
    return [
        _figures(
            policy,
            size,
            everyone,
            one,
            _gains(first, one, everyone, classes, random, single=single),
        )
        for policy, one in ran.items()
    ]


def _gains(
    old: Waits,
    new: Waits,
    everyone: IntArray,
    classes: list[str],
    random: np.random.Generator,
    *,
    single: bool,
) -> dict[str, Gain] | None:
    if new is old or single:
        return None
    # Tokens and mean loads are the same for the same requests: only their waits are compared.
    pairs = {
        "imbalance_ratio": (old.expert / old.tokens, new.expert / new.tokens),
        "straggler_factor": (old.rank / old.mean_rank, new.rank / new.mean_rank),
    }
    return {
        name: gain(first[everyone], second[everyone], classes, random)
        for name, (first, second) in pairs.items()
    }


def _figures(
    policy: str, size: int, everyone: IntArray, one: Waits, gains: dict[str, Gain] | None
) -> PolicyFigures:
    mean, median = one.tokens_per_expert
    return PolicyFigures(
        policy=policy,
        batch_size=size,
        requests=len(everyone),
        batches=len(everyone) // size,
        steps=one.steps,
        imbalance_ratio=one.imbalance_ratio,
        straggler_factor=one.straggler_factor,
        tokens_per_expert_mean=mean,
        tokens_per_expert_median=median,
        small_gemm_share=one.small_gemm_share,
        gains=gains,
    )
