"""Requests made up: classes with routing of their own, and requests that stray from it."""

from __future__ import annotations

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.topology import Layer
from routeprof.whatif.requests.served import LayerTokens, Requests, row_loads


def layer_of(index: int, experts: int, top_k: int) -> Layer:
    return Layer(index, f"layers.{index}", experts=experts, top_k=top_k, router="softmax")


def requests_of(
    phase: str,
    classes: list[str],
    lengths: IntArray,
    layers: list[tuple[Layer, IntArray, IntArray]],
) -> Requests:
    """Requests with given ids.

    Args:
        layers: the layer, ids [tokens, k] request by request, and prefill [requests, experts].
    """
    request = np.repeat(np.arange(len(lengths)), lengths)
    turn = np.concatenate([np.arange(length) for length in lengths])
    turn = turn if phase == "decode" else np.zeros_like(turn)
    return Requests(
        phase,
        tuple(str(number) for number in range(len(lengths))),
        tuple(classes),
        np.asarray(lengths),
        tuple(LayerTokens(layer, request, turn, ids, prefill) for layer, ids, prefill in layers),
    )


def random_requests(
    random: np.random.Generator,
    classes: list[str],
    signatures: FloatArray,
    *,
    phase: str = "decode",
    alike: float = 10.0,
    top_k: int = 2,
    length: tuple[int, int] = (6, 18),
) -> Requests:
    """Requests that draw experts without repetition from shares of their own.

    Args:
        signatures: ``[layers, classes, experts]``; classes in the order of their names.
        alike: how near a request's shares are to its class's (Dirichlet concentration).
    """
    names = sorted(set(classes))
    lengths = random.integers(*length, len(classes))
    layers = []
    for index, of_layer in enumerate(signatures):
        experts = of_layer.shape[1]
        own = np.stack(
            [random.dirichlet(alike * of_layer[names.index(name)] + 1e-3) for name in classes]
        )
        chance = np.log(np.repeat(own, lengths, axis=0) + 1e-12)
        ids = np.argsort(-(chance + random.gumbel(size=chance.shape)), axis=1)[:, :top_k]
        layers.append((layer_of(index, experts, top_k), ids, random.multinomial(40, own)))
    return requests_of(phase, classes, lengths, layers)


def with_ids_of(requests: Requests, places: IntArray, random: np.random.Generator) -> Requests:
    """The same requests, of which some were routed anyhow else."""
    layers = []
    for one in requests.layers:
        ids = one.ids.copy()
        theirs = np.isin(one.request, places)
        ids[theirs] = random.integers(0, one.layer.experts, ids[theirs].shape)
        prefill = one.prefill
        if requests.phase == "prefill":
            prefill = row_loads(one.request, ids, len(prefill), one.layer.experts)
        layers.append(LayerTokens(one.layer, one.request, one.turn, ids, prefill))
    return Requests(
        requests.phase, requests.names, requests.classes, requests.tokens, tuple(layers)
    )
