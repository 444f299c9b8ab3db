"""Profiles with known counts, made in memory by numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from routeprof.profile import Profile
from routeprof.recording.fold import LISTS, SUMS, Key, Totals, Windows
from routeprof.recording.reader import RankFiles, RecordingFiles
from routeprof.recording.schema import RankState, RecordingInfo
from routeprof.topology import Layer, ModelInfo

FACTORS = (1.0, 1.25, 2.0)
GATES = {"entropy_sum", "top1_sum", "margin_sum", "z_sum", "probability_mass", "weight_sum"}
STEPS_A_WINDOW = 4


def moe(index: int, experts: int = 8, top_k: int = 2, **other) -> Layer:
    name = other.pop("name", f"model.layers.{index}.mlp")
    return Layer(index, name, "moe", experts, top_k, "softmax", **other)


def build(
    layers: Sequence[Layer],
    steps: Mapping[Key, np.ndarray],
    *,
    silent: Sequence[int] = (),
    invalid: Mapping[int, int] | None = None,
    factors: tuple[float, ...] = FACTORS,
    model: ModelInfo | None = None,
    state: RankState | None = None,
    level: str = "windows",
) -> Profile:
    """A profile.

    Args:
        steps: for each phase and tag, the counts of every step, [steps, layers, experts].
        silent: positions of layers that no hook saw.
        invalid: position of a layer -> ids outside its range, in the first key.
    """
    info = RecordingInfo(
        id="test",
        layers=tuple(layers),
        passes=("model",) * len(layers),
        model=model or ModelInfo("tiny", "mixtral", 32, "float32", "transformers", "5.0", "cpu"),
        level=level,
        capacity_factors=factors,
    )
    unread = {n for n, layer in enumerate(layers) if layer.unsupported or layer.kind == "dense"}
    seen = [n for n in range(len(layers)) if n not in {*silent, *unread}]
    keys = tuple(steps)
    totals = Totals(
        keys,
        {name: _empty(name, (len(keys), len(layers))) for name in SUMS},
        {
            name: _empty(name, (len(keys), len(layers), _width(name, steps, factors)))
            for name in LISTS
        },
        np.full((len(keys), len(layers)), np.nan),
        _windows(layers, steps, seen, factors),
    )
    for number, counts in enumerate(steps.values()):
        for place in range(len(layers)):
            if place not in unread:
                totals.sums["steps"][number, place] = len(counts)
                made = counts[:, seen[0]].sum() // layers[seen[0]].top_k if seen else -1
                totals.sums["expected_tokens"][number, place] = made
        for place in seen:
            _fill(totals, number, place, layers[place], counts[:, place], factors)
    for place, count in (invalid or {}).items():
        totals.sums["invalid"][0, place] += count
        totals.sums["tokens"][0, place] += count // layers[place].top_k
        totals.sums["expected_tokens"][0, place] += count // layers[place].top_k
    files = None
    if state is not None:
        files = RecordingFiles(Path("somewhere"), info, (RankFiles(0, state, ()),))
    return Profile(info, totals, files)


def _empty(name, shape):
    if name in GATES:
        return np.full(shape, np.nan)
    if name == "expected_tokens":
        return np.full(shape, -1)
    return np.zeros(shape, float if name == "cost_seconds" else np.int64)


def _width(name, steps, factors):
    if name in ("overflow", "overflow_steps", "capacity_slots"):
        return len(factors)
    experts = max((counts.shape[2] for counts in steps.values()), default=0)
    return {"imbalance_histogram": 32 * 10 + 1, "gemm_histogram": 33}.get(name, experts)


def _fill(totals, number, place, layer, counts, factors):
    """What one layer counted under one key; ``counts`` is [steps, experts]."""
    counts = counts[:, : layer.experts]
    tokens = counts.sum(1) // layer.top_k
    whole = {"calls": len(counts), "tokens": tokens.sum(), "expected_tokens": tokens.sum()}
    for name, value in whole.items():
        totals.sums[name][number, place] = value
    totals.lists["counts"][number, place, : layer.experts] = counts.sum(0)
    busy = counts.sum(1) > 0
    ratios = counts[busy].max(1) / counts[busy].mean(1)
    bins = np.floor(32 * np.log2(ratios)).astype(int)
    np.add.at(totals.lists["imbalance_histogram"][number, place], bins, tokens[busy])
    totals.imbalance_max[number, place] = ratios.max() if len(ratios) else np.nan
    sizes = np.where(counts > 0, np.floor(np.log2(np.maximum(counts, 1))) + 1, 0).astype(int)
    np.add.at(totals.lists["gemm_histogram"][number, place], sizes.ravel(), 1)
    for position, factor in enumerate(factors):
        slots = np.ceil(factor * tokens * layer.top_k / layer.experts - 1e-9).astype(int)
        over = np.maximum(counts - slots[:, None], 0).sum(1)
        totals.lists["overflow"][number, place, position] = over.sum()
        totals.lists["overflow_steps"][number, place, position] = (over > 0).sum()
        totals.lists["capacity_slots"][number, place, position] = slots.sum() * layer.experts


def _windows(layers, steps, seen, factors):
    """Windows of a few steps, a second each, one key after the other."""
    rows, window = [], 0
    for key, counts in enumerate(steps.values()):
        for first in range(0, len(counts), STEPS_A_WINDOW):
            block = counts[first : first + STEPS_A_WINDOW]
            for place in seen:
                sums = block[:, place].sum(0)
                tokens = sums.sum() // layers[place].top_k
                rows.append((window, key, place, len(block), tokens, sums.sum(), sums.max()))
            window += 1
    if not rows:
        return Windows.empty(len(factors))
    table = np.array(rows, dtype=np.int64).T
    start = 1000.0 + table[0]
    nothing = np.zeros((len(rows), len(factors)), np.int64)
    rank = np.zeros(len(rows), np.int64)
    return Windows(table[0], rank, start, start + 1, *table[1:], overflow=nothing)


@pytest.fixture
def counts() -> np.ndarray:
    """Six steps of four layers with eight experts, ten tokens with two choices each."""
    random = np.random.default_rng(7)
    return np.array([[_choices(random, 8, 10) for _ in range(4)] for _ in range(6)])


def _choices(random, experts, tokens):
    """Counts of tokens that choose two different experts each, the low numbers more often."""
    chance = 1 / np.arange(1, experts + 1)
    chosen = [random.choice(experts, 2, False, chance / chance.sum()) for _ in range(tokens)]
    return np.bincount(np.ravel(chosen), minlength=experts)


@pytest.fixture
def profile(counts: np.ndarray) -> Profile:
    """Everything captured, in two phases and two tags."""
    return build(
        [moe(index) for index in range(4)],
        {
            ("prefill", "code"): counts[:2],
            ("decode", "code"): counts[2:4],
            ("decode", "prose"): counts[4:],
        },
        state=RankState(state="stopped", cost_seconds=0.25, busy_seconds=10.0),
    )


@pytest.fixture
def partial(counts: np.ndarray) -> Profile:
    """A dense layer, one captured, one silent and one unsupported."""
    layers = [
        Layer(0, "model.layers.0.mlp", "dense"),
        moe(1),
        moe(2),
        moe(3, unsupported="fused router"),
    ]
    return build(layers, {("decode", None): counts}, silent=[2])


def large(layers: int = 61, experts: int = 256, steps: int = 12) -> Profile:
    """As large as a DeepSeek-V3, skewed, with a few layers that were not captured."""
    random = np.random.default_rng(0)
    kinds = [
        moe(n + 3, experts, 8, unsupported="fused router" if n == 40 else "") for n in range(layers)
    ]
    skew = random.dirichlet(np.full(experts, 1.2), layers)
    skew[layers // 3] = random.dirichlet(np.full(experts, 0.15))
    parts = {
        ("prefill", "code"): (steps // 2, 4096, skew),
        ("decode", "code"): (steps, 128, skew),
        ("decode", "chat"): (steps, 128, np.roll(skew, 5, 1)),
    }
    made = {
        key: np.array(
            [[random.multinomial(8 * tokens, row) for row in share] for _ in range(count)]
        )
        for key, (count, tokens, share) in parts.items()
    }
    return build(kinds, made, silent=[10, 11], factors=(1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0))
