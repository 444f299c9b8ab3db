"""Traffic as a server sees it: tokens of a request are alike, and requests last many steps."""

from __future__ import annotations

import numpy as np

LAYERS, EXPERTS, TOPICS, TOP_K = 3, 16, 6, 2


def steps(
    seed, number: int, *, life: float = 20, batch: int = 32, shift: float = 0.0
) -> np.ndarray:
    """Loads of decode steps, [steps, layers, experts].

    Each request has a topic and a taste of its own, and ends with a chance of 1 ÷ life a step.
    Each of its tokens chooses TOP_K experts by that.

    Args:
        life: steps that a request lasts on average; 1 is one step each.
        shift: in the second half expert 3 of layer 1 gets so much more of its share.
    """
    base = np.random.default_rng(0).dirichlet(np.full(EXPERTS, 8.0), size=(LAYERS, TOPICS))
    random = np.random.default_rng(seed)

    new = random.random((number, batch)) < 1 / life
    new[0] = True
    request = np.cumsum(new.T.ravel()).reshape(batch, number).T - 1  # each slot has its own
    count = int(request.max()) + 1
    tastes = random.gamma(EXPERTS * base[:, random.integers(TOPICS, size=count)])
    loads = np.zeros((number, LAYERS, EXPERTS))
    for layer in range(LAYERS):
        for first, last in ((0, number // 2), (number // 2, number)):
            own = tastes[layer].copy()
            own[:, 3] *= 1 + shift if first and layer == 1 else 1.0
            upto = np.cumsum(own, axis=1) / own.sum(axis=1, keepdims=True)
            for start in range(first, last, 100):
                now = slice(start, min(start + 100, last))
                loads[now, layer] = _drawn(upto[request[now]], random)
    return loads


def _drawn(upto: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Loads [steps, experts] of tokens whose cumulated shares are [steps, batch, experts]."""
    steps, batch = upto.shape[:2]
    ids = np.zeros((steps, batch, TOP_K), dtype=np.int64)
    for choice in range(TOP_K):
        ids[..., choice] = (random.random((steps, batch, 1)) > upto[..., :-1]).sum(axis=-1)
    ids += EXPERTS * np.arange(steps)[:, None, None]
    return np.bincount(ids.ravel(), minlength=steps * EXPERTS).reshape(steps, EXPERTS)
